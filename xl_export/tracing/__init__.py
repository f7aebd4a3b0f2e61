"""The traced step: a PyTorch module as an ONNX graph, by `torch.onnx.export`."""
