"""Models of sequences after PyTorch's tutorials and examples; see plain_models.py."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional


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
