"""From torch.compile's call to one functional graph with a symbolic batch size."""
