"""Artefacts on an NVIDIA GPU with ONNX Runtime: its CUDA, TensorRT and TensorRT-RTX providers."""
