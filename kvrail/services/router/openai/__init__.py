"""What OpenAI's answers are made of: writers, events, usage, log probabilities."""
