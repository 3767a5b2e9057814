"""Public models: what their folders hold, and which of their tensors make which of our parameters."""
