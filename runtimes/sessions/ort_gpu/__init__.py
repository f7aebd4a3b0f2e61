"""Artefacts on an NVIDIA GPU with ONNX Runtime: its CUDA provider."""
