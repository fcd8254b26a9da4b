"""The engine that runs a plan: stages on devices, their weights, messages and sums. From here on,
torch.
"""
