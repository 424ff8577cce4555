"""The second way of capture, for models that Dynamo refuses: the forward runs once, as Python, on fakes of its
inputs.
"""
