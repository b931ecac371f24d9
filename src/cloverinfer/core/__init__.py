"""The nouns every room shares: requests, sampling parameters, errors, the clock."""
