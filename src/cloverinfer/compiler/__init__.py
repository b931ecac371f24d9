"""The graph compiler: takes a causal language model of PyTorch, and cuts its graph at attention.

What comes out are stages: graphs with their weights as inputs, and one KV spec per attention call.
"""
