"""Pre-train an enlarged BERT on the text of the Python standard library's own sources, in the way of RaNNC's
BERT example.

    mpirun -np 2 python examples/train_bert.py --hidden 256 --layers 8
    mpirun -np 2 python examples/train_bert.py --accumulate 4 --precision bfloat16 --save run --resume

The model is Hugging Face's, unmodified: masked words and the next sentence are guessed, and both losses are
added inside the model. Words are bytes; a "sentence" is a run of bytes of a module, and the second half of a
pair follows the first half or comes from elsewhere. Each rank draws its own pairs, by step and rank alone, so
that a resumed run sees what an uninterrupted one would have seen.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from reporting import Progress, rank_and_world
from sources import has_checkpoint, standard_library_text
from transformers import BertConfig, BertForPreTraining

import rannc_backend

PAD, CLS, SEP, MASK = 256, 257, 258, 259
VOCABULARY = 260
IGNORED = -100
SHARE_MASKED = 0.15


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, default=128, help="hidden size; RaNNC's largest run had 2048")
    parser.add_argument("--layers", type=int, default=4, help="encoder layers; RaNNC's largest run had 96")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq", type=int, default=64, help="tokens per pair of sentences")
    parser.add_argument("--batch", type=int, default=8, help="pairs per rank and forward")
    parser.add_argument(
        "--accumulate", type=int, default=1, help="forwards per update; gradients are reduced once per update"
    )
    parser.add_argument("--steps", type=int, default=60, help="updates")
    parser.add_argument("--lr", type=float, default=1e-3, help="after the warm-up")
    parser.add_argument(
        "--warmup",
        type=int,
        default=10,
        help="updates in which the learning rate rises; it falls linearly afterwards",
    )
    parser.add_argument(
        "--clip", type=float, default=1.0, help="largest norm of all gradients; 0: no clipping"
    )
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument(
        "--precision", choices=("float32", "bfloat16", "float16"), default="float32", help="of autocast"
    )
    parser.add_argument("--save", default="", help="directory for checkpoints; empty: none")
    parser.add_argument(
        "--save-every", type=int, default=0, help="updates between two checkpoints; 0: at the end only"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint in --save, if there is one"
    )
    parser.add_argument("--micro-batches", type=int, default=0, help="0: the planner decides")
    parser.add_argument("--stages", type=int, default=0, help="0: the planner decides")
    parser.add_argument("--stage-compiler", default="inductor" if torch.cuda.is_available() else "eager")
    parser.add_argument("--every", type=int, default=10, help="updates between two lines")
    return parser.parse_args(argv)


def draw_pairs(
    text: torch.Tensor, rows: int, length: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """A batch: [rows, length] tokens CLS first SEP second SEP with some of them masked, and what is to be
    guessed.
    """
    half = (length - 3) // 2
    starts = torch.randint(len(text) - 2 * half, (rows,), generator=generator)
    # 1: the second sentence comes from elsewhere, as Hugging Face has it.
    elsewhere = torch.randint(2, (rows,), generator=generator)
    other = torch.randint(len(text) - half, (rows,), generator=generator)
    offsets = torch.arange(half)
    first = text[starts.unsqueeze(1) + offsets]
    second = text[torch.where(elsewhere == 1, other, starts + half).unsqueeze(1) + offsets]
    edge = torch.full((rows, 1), SEP)
    padding = torch.full((rows, length - 2 * half - 3), PAD)
    tokens = torch.cat([torch.full((rows, 1), CLS), first, edge, second, edge, padding], dim=1)
    segments = (torch.arange(length) > half + 1).long().expand(rows, length).contiguous()
    chance = torch.rand(rows, length, generator=generator)
    hidden = (chance < SHARE_MASKED) & (tokens < PAD)
    labels = tokens.masked_fill(~hidden, IGNORED)
    # Of the words to be guessed 80 % are masked, 10 % are another word, 10 % stay.
    random = torch.randint(PAD, (rows, length), generator=generator)
    masked = torch.where(
        chance < 0.8 * SHARE_MASKED, MASK, torch.where(chance < 0.9 * SHARE_MASKED, random, tokens)
    )
    return {
        "input_ids": torch.where(hidden, masked, tokens),
        "token_type_ids": segments,
        "attention_mask": (tokens != PAD).long(),
        "labels": labels,
        "next_sentence_label": elsewhere,
    }


def build(flags: argparse.Namespace) -> BertForPreTraining:
    """The model, in training mode."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=flags.hidden,
        num_hidden_layers=flags.layers,
        num_attention_heads=flags.heads,
        intermediate_size=4 * flags.hidden,
        max_position_embeddings=flags.seq,
        hidden_dropout_prob=flags.dropout,
        attention_probs_dropout_prob=flags.dropout,
        pad_token_id=PAD,
    )
    torch.manual_seed(0)
    return BertForPreTraining(config).train()


def warm_up(flags: argparse.Namespace, update: int) -> float:
    """Share of the learning rate in an update: rises to 1, then falls to 0 at the last."""
    rising = (update + 1) / max(1, flags.warmup)
    falling = (flags.steps - update) / max(1, flags.steps - flags.warmup)
    return max(0.0, min(rising, falling))


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; give the loss of each update that was made."""
    flags = parse(argv)
    rank, world = rank_and_world()
    text = standard_library_text()
    net = build(flags)
    optimizer = torch.optim.AdamW(net.parameters(), lr=flags.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: warm_up(flags, update))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # float16 alone needs its gradients scaled; without it the scaler passes everything through.
    scaler = torch.amp.GradScaler(device, enabled=flags.precision == "float16", init_scale=2.0**12)
    options = {
        "pipeline_num": flags.micro_batches,
        "partition_num": flags.stages,
        "stage_compiler": flags.stage_compiler,
        "outputs": "loss",
    }
    model = rannc_backend.RaNNCModule(net, optimizer, options=options)
    first = 0
    if has_checkpoint(flags):
        first = rannc_backend.load_checkpoint(flags.save, net, optimizer, scheduler, scaler=scaler).step
    progress = Progress(what="pairs", every=flags.every)
    cast = torch.autocast(device, dtype=getattr(torch, flags.precision), enabled=flags.precision != "float32")
    for update in range(first, flags.steps):
        optimizer.zero_grad()
        mean_loss = 0.0
        for part in range(flags.accumulate):
            generator = torch.Generator().manual_seed((update * flags.accumulate + part) * world + rank)
            batch = draw_pairs(text, flags.batch, flags.seq, generator)
            # Gradients add up on each rank; only the last part's backward sums them over the ranks.
            rannc_backend.delay_grad_allreduce(part < flags.accumulate - 1)
            with cast:
                loss = model(**batch).loss / flags.accumulate
            scaler.scale(loss).backward()
            mean_loss += loss.item()
        scaler.unscale_(optimizer)
        if flags.clip:
            model.clip_grad_norm(flags.clip)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        progress.step(mean_loss, world * flags.batch * flags.accumulate)
        done = update + 1
        if flags.save and (done == flags.steps or (flags.save_every and done % flags.save_every == 0)):
            rannc_backend.save_checkpoint(
                flags.save, net, optimizer, scheduler, scaler=scaler, step=done, keep=2
            )
    progress.end()
    return progress.losses


if __name__ == "__main__":
    main()
