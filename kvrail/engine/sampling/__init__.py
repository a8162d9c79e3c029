"""From logits to tokens: draws, noise, penalties, grammar masks, log probabilities."""
