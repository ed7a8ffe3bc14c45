"""The sampler's parts: what edits logits, what narrows a distribution, how a token is drawn."""
