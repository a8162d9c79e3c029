"""Steps of every mix: chunks of prompts, decodes, and both."""

import random

from kvrail.engine.batch.batch import SequenceSlice


def steps_of(sequences: list[list[int]], seed: int) -> list[list[SequenceSlice]]:
    """Chunks and decodes of all sequences, mixed, up to 40 tokens at once."""
    choice, done, steps = random.Random(seed), [0] * len(sequences), []
    pages = choice.sample(range(64), 64)
    tables = [[pages.pop() for _ in range(-(-len(ids) // 16))] for ids in sequences]
    while any(at < len(ids) for at, ids in zip(done, sequences, strict=True)):
        slices, room = [], 40
        for i, ids in enumerate(sequences):
            count = min(choice.choice([0, 1, 1, 2, 17, 30]), len(ids) - done[i], room)
            if count:
                new = ids[done[i] : done[i] + count]
                slices.append(SequenceSlice(new, done[i], tables[i], choice.randint(0, count)))
                done[i], room = done[i] + count, room - count
        if slices:
            steps.append(slices)
    return steps
