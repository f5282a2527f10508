"""A small masked language model and its data, for tests."""

import torch

WORDS, LENGTH, MASK = 48, 12, 0


class SmallBert(torch.nn.Module):
    """Embeddings, one encoder layer, a classifier over the vocabulary; returns the loss."""

    def __init__(self, width=32):
        super().__init__()
        torch.manual_seed(11)
        self.words = torch.nn.Embedding(WORDS, width)
        self.positions = torch.nn.Embedding(LENGTH, width)
        self.layer = torch.nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True)
        self.classifier = torch.nn.Linear(width, WORDS)

    def forward(self, tokens, targets):
        x = self.words(tokens) + self.positions.weight
        scores = self.classifier(self.layer(x)).float()
        hidden = tokens == MASK
        return torch.nn.functional.cross_entropy(scores[hidden], targets[hidden])


def batch(rank, step, n):
    """Words count upwards from a random start; a third is hidden."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(0, WORDS - 1, (n, 1), generator=generator)
    targets = 1 + (start + torch.arange(LENGTH)) % (WORDS - 1)
    hidden = torch.rand(n, LENGTH, generator=generator) < 0.33
    hidden[:, 0] = True
    return torch.where(hidden, MASK, targets), targets
