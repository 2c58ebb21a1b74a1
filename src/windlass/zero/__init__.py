"""DeepSpeed's ZeRO: gradients, optimizer state and parameters that its engine divides among ranks."""
