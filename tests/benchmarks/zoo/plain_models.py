"""Models after PyTorch's tutorials and examples, as users write them: each a module whose forward gives a loss.

The name of a class is that of the tutorial or example it follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

ROWS = 5


class MnistNet(nn.Module):
    """examples/mnist."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 8, 3, 1)
        self.fc1, self.fc2 = nn.Linear(8 * 144, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        x = torch.flatten(functional.max_pool2d(x, 2), 1)
        return functional.nll_loss(functional.log_softmax(self.fc2(functional.relu(self.fc1(x))), dim=1), y)


class Vae(nn.Module):
    """examples/vae, with its noise passed in and its loss a sum over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.fc3, self.fc4 = nn.Linear(4, 32), nn.Linear(32, 64)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        h = functional.relu(self.fc1(x.view(-1, 64)))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + noise * torch.exp(0.5 * logvar)
        found = torch.sigmoid(self.fc4(functional.relu(self.fc3(z))))
        bce = functional.binary_cross_entropy(found, x.view(-1, 64), reduction="sum")
        return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


class WordLanguageModel(nn.Module):
    """examples/word_language_model with an LSTM, tied weights, batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(40, 16)
        self.rnn = nn.LSTM(16, 16, 2, batch_first=True)
        self.decoder = nn.Linear(16, 40)
        self.decoder.weight = self.encoder.weight

    def init_hidden(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = next(self.parameters())
        return weight.new_zeros(2, rows, 16), weight.new_zeros(2, rows, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output, _ = self.rnn(self.encoder(x), self.init_hidden(x.size(0)))
        decoded = self.decoder(output).view(-1, 40)
        return functional.nll_loss(functional.log_softmax(decoded, dim=1), y.view(-1))


class PositionalEncoding(nn.Module):
    """Of the transformer tutorial: sequence first."""

    def __init__(self, width: int, longest: int = 64) -> None:
        super().__init__()
        position = torch.arange(longest).unsqueeze(1)
        scale = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        pe = torch.zeros(longest, 1, width)
        pe[:, 0, 0::2] = torch.sin(position * scale)
        pe[:, 0, 1::2] = torch.cos(position * scale)
        self.register_buffer("pe", pe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.pe[: x.size(0)]


class TransformerTutorial(nn.Module):
    """tutorials/transformer_tutorial: sequence first inside, a causal mask made in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.pos_encoder = nn.Embedding(40, 16), PositionalEncoding(16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0)
        self.transformer_encoder, self.linear = nn.TransformerEncoder(layer, 2), nn.Linear(16, 40)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        src = self.pos_encoder(self.embedding(x.t()) * math.sqrt(16))
        mask = nn.Transformer.generate_square_subsequent_mask(len(src), dtype=src.dtype)
        output = self.linear(self.transformer_encoder(src, mask))
        return functional.cross_entropy(output.reshape(-1, 40), y.t().reshape(-1))


class TranslationTransformer(nn.Module):
    """tutorials/translation_transformer: `nn.Transformer` with masks of padding and of the future."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(16, 2, 2, 2, 32, 0.0, batch_first=True)
        self.source, self.target, self.generator = (
            nn.Embedding(40, 16),
            nn.Embedding(40, 16),
            nn.Linear(16, 40),
        )

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        before, after = target[:, :-1], target[:, 1:]
        future = nn.Transformer.generate_square_subsequent_mask(before.shape[1], dtype=torch.float64)
        future = future.to(self.source.weight.dtype)
        padding = torch.zeros(source.shape, dtype=self.source.weight.dtype).masked_fill(source == 0, -1e9)
        hidden = self.transformer(
            self.source(source),
            self.target(before),
            tgt_mask=future,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        logits = self.generator(hidden)
        return functional.cross_entropy(logits.reshape(-1, 40), after.reshape(-1), ignore_index=0)


class TextSentiment(nn.Module):
    """tutorials/text_sentiment: bags of words, all of one length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.EmbeddingBag(40, 16, sparse=False), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.fc(self.embedding(x)), y)


class TextSentimentOffsets(TextSentiment):
    """The same with its text flat and an offset per row."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        offsets = torch.arange(x.shape[0]) * x.shape[1]
        return functional.cross_entropy(self.fc(self.embedding(x.reshape(-1), offsets)), y)


class CharRnn(nn.Module):
    """tutorials/char_rnn_classification: a recurrent cell of its own, called in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.i2h, self.h2o = nn.Linear(20 + 16, 16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(x.shape[0], 16, dtype=x.dtype)
        for step in range(x.shape[1]):
            hidden = torch.tanh(self.i2h(torch.cat((x[:, step], hidden), 1)))
        return functional.nll_loss(functional.log_softmax(self.h2o(hidden), 1), y)


class TimeSequence(nn.Module):
    """examples/time_sequence_prediction: LSTM cells over `split`."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 11), nn.LSTMCell(11, 11), nn.Linear(11, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        outputs = []
        h_t, c_t, h_t2, c_t2 = (torch.zeros(x.size(0), 11, dtype=x.dtype) for _ in range(4))
        for value in x.split(1, dim=1):
            h_t, c_t = self.lstm1(value, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            outputs += [self.linear(h_t2)]
        return functional.mse_loss(torch.cat(outputs, dim=1), y)


class Seq2Seq(nn.Module):
    """tutorials/seq2seq_translation: GRUs and additive attention."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(40, 16), nn.Embedding(40, 16)
        self.encoder, self.decoder = nn.GRU(16, 16, batch_first=True), nn.GRU(32, 16, batch_first=True)
        self.wa, self.ua, self.va, self.out = (
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 1),
            nn.Linear(16, 40),
        )

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        keys, hidden = self.encoder(self.source(source))
        logits = []
        for step in range(target.shape[1] - 1):
            query = hidden.permute(1, 0, 2)
            scores = self.va(torch.tanh(self.wa(query) + self.ua(keys))).squeeze(2).unsqueeze(1)
            context = torch.bmm(functional.softmax(scores, dim=-1), keys)
            word = self.target(target[:, step : step + 1])
            output, hidden = self.decoder(torch.cat((word, context), dim=2), hidden)
            logits.append(self.out(output))
        found = torch.cat(logits, dim=1)
        return functional.cross_entropy(found.reshape(-1, 40), target[:, 1:].reshape(-1))


class SpatialTransformer(nn.Module):
    """tutorials/spatial_transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 5), nn.Linear(4 * 144, 10)
        self.localization = nn.Sequential(nn.Conv2d(1, 4, 7), nn.MaxPool2d(2, stride=2), nn.ReLU(True))
        self.fc_loc = nn.Sequential(nn.Linear(4 * 121, 8), nn.ReLU(True), nn.Linear(8, 6))
        self.fc_loc[2].bias.data.copy_(torch.tensor([1, 0, 0.1, 0, 1, 0.2]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        theta = self.fc_loc(self.localization(x).view(-1, 4 * 121)).view(-1, 2, 3)
        x = functional.grid_sample(x, functional.affine_grid(theta, x.size(), False), align_corners=False)
        x = functional.relu(functional.max_pool2d(self.conv(x), 2)).view(-1, 4 * 144)
        return functional.cross_entropy(self.fc(x), y)


class SuperResolution(nn.Module):
    """examples/super_resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 5, 1, 2), nn.Conv2d(8, 4, 3, 1, 1)
        self.pixel_shuffle = nn.PixelShuffle(2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.pixel_shuffle(self.conv2(self.relu(self.conv1(x)))), y)


class DcganDiscriminator(nn.Module):
    """tutorials/dcgan: batch normalization, strided convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 16, 4, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy(self.main(x).view(-1), y)


class Siamese(nn.Module):
    """examples/siamese_network: one tower, two images."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 16))
        self.fc = nn.Sequential(nn.Linear(32, 16), nn.ReLU(inplace=True), nn.Linear(16, 1))

    def forward(self, first: torch.Tensor, second: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = torch.sigmoid(self.fc(torch.cat((self.tower(first), self.tower(second)), 1)))
        return functional.binary_cross_entropy(found.squeeze(), y)


class GraphConvolution(nn.Module):
    """examples/gcn, for a batch of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(6, 16) / 4), nn.Parameter(torch.randn(16, 3) / 4)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(torch.bmm(adjacency, x @ self.first))
        found = functional.log_softmax(torch.bmm(adjacency, hidden @ self.second), dim=-1)
        return functional.nll_loss(found.reshape(-1, 3), y.reshape(-1))


class ActorCritic(nn.Module):
    """examples/reinforcement_learning: policy and value, summed losses."""

    def __init__(self) -> None:
        super().__init__()
        self.affine, self.action, self.value = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, taken: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.affine(x))
        chances = torch.distributions.Categorical(logits=self.action(hidden), validate_args=False)
        value = self.value(hidden).squeeze(-1)
        policy = -chances.log_prob(taken) * (gain - value).detach()
        return policy.sum() + functional.smooth_l1_loss(value, gain, reduction="sum")


class DeepQ(nn.Module):
    """tutorials/reinforcement_q_learning: the value of the action taken."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)
        )

    def forward(self, x: torch.Tensor, taken: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        found = self.layers(x).gather(1, taken.unsqueeze(1))
        return functional.smooth_l1_loss(found, gain.unsqueeze(1))


class PackedTagger(nn.Module):
    """A tagger of sentences of several lengths, in a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.tags = nn.Embedding(40, 16), nn.Linear(32, 4)
        self.lstm = nn.LSTM(16, 16, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.words(x), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        output, _ = nn.utils.rnn.pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=x.shape[1]
        )
        return functional.cross_entropy(self.tags(output).transpose(1, 2), y, ignore_index=-100)


class MaskedTokens(nn.Module):
    """A language model that computes its head for masked tokens only."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden, chosen = self.layer(self.words(x)), y != -100
        return functional.cross_entropy(self.head(hidden[chosen]), y[chosen])


class SpeechCtc(nn.Module):
    """Speech recognition with connectionist temporal classification."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rnn, self.out = nn.Conv1d(6, 16, 3, padding=1), nn.GRU(16, 16), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        frames = functional.relu(self.conv(x)).permute(2, 0, 1)
        chances = functional.log_softmax(self.out(self.rnn(frames)[0]), dim=2)
        steps = torch.full((x.shape[0],), chances.shape[0], dtype=torch.long)
        return functional.ctc_loss(chances, y, steps, lengths)


class SimClr(nn.Module):
    """Contrastive learning of two views."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        views = functional.normalize(torch.cat([self.net(first), self.net(second)]), dim=1)
        scores = (views @ views.t() / 0.5).fill_diagonal_(-1e9)
        rows = first.shape[0]
        labels = torch.cat([torch.arange(rows) + rows, torch.arange(rows)])
        return functional.cross_entropy(scores, labels)


class MixtureOfExperts(nn.Module):
    """Tokens to their best expert, in a loop over experts with `nonzero`."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.out = nn.Linear(12, 3), nn.Linear(12, 4)
        self.experts = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 12)
        weight, expert = torch.softmax(self.router(flat), -1).max(-1)
        mixed = torch.zeros_like(flat)
        for index, layer in enumerate(self.experts):
            place = torch.where(expert == index)[0]
            mixed.index_add_(0, place, layer(flat[place]) * weight[place, None])
        return functional.cross_entropy(self.out(mixed).view(*x.shape[:2], 4).transpose(1, 2), y)


class Gan(nn.Module):
    """A generator and a critic with a penalty on the critic's gradient, in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12))
        self.judge = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, noise: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        made = self.make(noise)
        between = (0.5 * made + 0.5 * real).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.judge(between).sum(), between, create_graph=True)
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        return self.judge(made).mean() - self.judge(real).mean() + 10 * penalty


class NeuralStyleBlock(nn.Module):
    """examples/fast_neural_style: instance normalization, reflection padding, Gram matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.pad, self.conv = nn.ReflectionPad2d(1), nn.Conv2d(3, 8, 3)
        self.norm, self.up = nn.InstanceNorm2d(8, affine=True), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.norm(self.conv(self.pad(x))))
        found = self.up(functional.interpolate(hidden, scale_factor=2, mode="nearest"))
        rows, channels, height, width = found.size()
        features = found.view(rows, channels, height * width)
        gram = features.bmm(features.transpose(1, 2)) / (channels * height * width)
        return functional.mse_loss(gram, style.expand_as(gram)) + found.abs().mean()


class ForwardModeJacobian(nn.Module):
    """tutorials/jacobians_hessians: `torch.func.jacrev` and `vmap` inside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        jacobian = torch.func.vmap(torch.func.jacrev(self.net))(x)
        return functional.mse_loss(self.net(x), y) + 0.1 * jacobian.pow(2).sum(dim=(1, 2)).mean()


class Parametrized(nn.Module):
    """tutorials/parametrizations: weight norm, spectral norm off, an orthogonal weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(12, 16))
        self.second = nn.utils.parametrizations.orthogonal(nn.Linear(16, 16))
        self.out = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.out(torch.tanh(self.second(torch.relu(self.first(x))))), y)


class Checkpointed(nn.Module):
    """Blocks under `torch.utils.checkpoint`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.GELU()) for _ in range(4))
        self.out = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return functional.cross_entropy(self.out(x), y)


class Detached(nn.Module):
    """A loss with a check of its values, a path by a mask and a logged number."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)), []

    def forward(self, x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if mask.all():
            found = self.net(x)
        else:
            found = self.net(x * mask)
        return functional.cross_entropy(found, y)


def _image(size: int, channels: int = 1) -> torch.Tensor:
    return torch.randn(ROWS, channels, size, size)


def _labels(number: int, *shape: int) -> torch.Tensor:
    return torch.randint(number, (ROWS, *shape))


def _masked(share: int) -> torch.Tensor:
    labels = _labels(40, 8)
    labels[:, ::share] = -100
    return labels


MODELS: dict[str, tuple[type[nn.Module], Callable[[], dict[str, Any]]]] = {
    "MnistNet": (MnistNet, lambda: {"x": _image(28), "y": _labels(10)}),
    "Vae": (Vae, lambda: {"x": torch.rand(ROWS, 1, 8, 8), "noise": torch.randn(ROWS, 4)}),
    "WordLanguageModel": (WordLanguageModel, lambda: {"x": _labels(40, 8), "y": _labels(40, 8)}),
    "TransformerTutorial": (TransformerTutorial, lambda: {"x": _labels(40, 8), "y": _labels(40, 8)}),
    "TranslationTransformer": (
        TranslationTransformer,
        lambda: {"source": _labels(40, 8), "target": _labels(40, 7)},
    ),
    "TextSentiment": (TextSentiment, lambda: {"x": _labels(40, 8), "y": _labels(4)}),
    "TextSentimentOffsets": (TextSentimentOffsets, lambda: {"x": _labels(40, 8), "y": _labels(4)}),
    "CharRnn": (CharRnn, lambda: {"x": torch.randn(ROWS, 6, 20), "y": _labels(5)}),
    "TimeSequence": (TimeSequence, lambda: {"x": torch.randn(ROWS, 6), "y": torch.randn(ROWS, 6)}),
    "Seq2Seq": (Seq2Seq, lambda: {"source": _labels(40, 6), "target": _labels(40, 5)}),
    "SpatialTransformer": (SpatialTransformer, lambda: {"x": _image(28), "y": _labels(10)}),
    "SuperResolution": (SuperResolution, lambda: {"x": _image(8), "y": _image(16)}),
    "DcganDiscriminator": (DcganDiscriminator, lambda: {"x": _image(16, 3), "y": torch.rand(ROWS)}),
    "Siamese": (Siamese, lambda: {"first": _image(8), "second": _image(8), "y": torch.rand(ROWS)}),
    "GraphConvolution": (
        GraphConvolution,
        lambda: {"x": torch.randn(ROWS, 7, 6), "adjacency": torch.rand(ROWS, 7, 7), "y": _labels(3, 7)},
    ),
    "ActorCritic": (
        ActorCritic,
        lambda: {"x": torch.randn(ROWS, 4), "taken": _labels(2), "gain": torch.randn(ROWS)},
    ),
    "DeepQ": (DeepQ, lambda: {"x": torch.randn(ROWS, 4), "taken": _labels(2), "gain": torch.randn(ROWS)}),
    "PackedTagger": (
        PackedTagger,
        lambda: {"x": _labels(40, 6), "lengths": torch.tensor([6, 4, 5, 2, 3]), "y": _labels(4, 6)},
    ),
    "MaskedTokens": (MaskedTokens, lambda: {"x": _labels(40, 8), "y": _masked(3)}),
    "SpeechCtc": (
        SpeechCtc,
        lambda: {
            "x": torch.randn(ROWS, 6, 12),
            "y": torch.randint(1, 10, (ROWS, 4)),
            "lengths": torch.tensor([4, 3, 2, 4, 1]),
        },
    ),
    "SimClr": (SimClr, lambda: {"first": torch.randn(ROWS, 12), "second": torch.randn(ROWS, 12)}),
    "MixtureOfExperts": (MixtureOfExperts, lambda: {"x": torch.randn(ROWS, 6, 12), "y": _labels(4, 6)}),
    "Gan": (Gan, lambda: {"noise": torch.randn(ROWS, 4), "real": torch.randn(ROWS, 12)}),
    "NeuralStyleBlock": (
        NeuralStyleBlock,
        lambda: {"x": _image(8, 3), "style": torch.randn(1, 3, 3)},
    ),
    "ForwardModeJacobian": (
        ForwardModeJacobian,
        lambda: {"x": torch.randn(ROWS, 4), "y": torch.randn(ROWS, 2)},
    ),
    "Parametrized": (Parametrized, lambda: {"x": torch.randn(ROWS, 12), "y": _labels(4)}),
    "Checkpointed": (Checkpointed, lambda: {"x": torch.randn(ROWS, 12), "y": _labels(4)}),
    "Detached": (
        Detached,
        lambda: {"x": torch.randn(ROWS, 12), "mask": torch.ones(ROWS, 12), "y": _labels(4)},
    ),
}


def make(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model in training mode and the arguments of its forward."""
    model, batch = MODELS[name]
    return model().train(), batch()
