"""A client of fedveil without PyTorch: NumPy, ONNX Runtime, and for the secure sum and privacy `cryptography`."""
