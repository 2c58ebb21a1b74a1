"""In which precision a step computes: autocast, the loss scaler of fp16, and what a device can do."""
