"""The step of a model as an ONNX graph."""
