"""`pylate-flash` with sentence-transformers 6: it trains what the host trains, and loses nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from sentence_transformers import (
    MultiVectorEncoder,
    MultiVectorEncoderTrainer,
    MultiVectorEncoderTrainingArguments,
)
from sentence_transformers.multi_vector_encoder import losses

from pylate_flash.cli.models import load_model
from pylate_flash.encoding.texts import encode, read_lengths, text_lengths
from pylate_flash.hosts.sentence_transformers import losses as our_losses
from pylate_flash.hosts.sentence_transformers import trainer as our_trainer
from tests.cli.commands import CPU, assert_one_clear_sentence, invoke, succeed, train, trained, write_lines
from tests.pylate_checkpoint import WORDS

STEPS, BATCH = 3, 4
OURS = (
    our_losses.MultiVectorMultipleNegativesRankingLoss,
    our_losses.CachedMultiVectorMultipleNegativesRankingLoss,
    our_losses.MultiVectorDistillKLDivLoss,
)
QUERIES = [f"{WORDS[i % 6]} {WORDS[i % 5 + 7]}" for i in range(12)]
POSITIVES = [f"{WORDS[i % 6]} and {WORDS[(i + 3) % 6]} ." for i in range(12)]
NEGATIVES = [f"{WORDS[(i + 1) % 6]} a {WORDS[i % 4 + 8]}" for i in range(12)]


@pytest.fixture
def pairs(tmp_path):
    return write(tmp_path / "pairs.jsonl", query=QUERIES, positive=POSITIVES, negative=NEGATIVES)


@pytest.fixture
def lists(tmp_path):
    scores = [[i % 3 + 1.0, 0.5, -0.25 * i] for i in range(12)]
    documents = [list(row) for row in zip(POSITIVES, NEGATIVES, QUERIES, strict=True)]
    return write(tmp_path / "lists.jsonl", query=QUERIES, documents=documents, scores=scores)


def write(path, **columns):
    return write_lines(path, *(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)))


def trained_by_the_host(folder, rows, loss, output, **arguments):
    """Train with the host's own trainer, losses and scores, and the prompts that its `encode` prepends to texts."""
    model = MultiVectorEncoder(str(folder), device="cpu")
    texts = [name for name in rows.column_names if name != "scores"]
    MultiVectorEncoderTrainer(
        model=model,
        args=MultiVectorEncoderTrainingArguments(
            output_dir=str(output),
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-3,
            # As `train` sets it for so few steps.
            warmup_steps=0,
            seed=7,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            prompts={name: "[Q] " if name == "query" else "[D] " for name in texts},
            **arguments,
        ),
        train_dataset=rows,
        loss=loss(model),
    ).train()
    return model


def embeddings(model):
    results = [*encode(model, QUERIES, is_query=True), *encode(model, POSITIVES, is_query=False)]
    return torch.cat([torch.as_tensor(result) for result in results])


@pytest.mark.parametrize(
    ("kind", "options", "loss"),
    [
        (
            "contrastive",
            ("--temperature", 0.5),
            lambda model: losses.MultiVectorMultipleNegativesRankingLoss(model, scale=2.0),
        ),
        (
            "cached",
            ("--mini-batch-size", 3),
            lambda model: losses.CachedMultiVectorMultipleNegativesRankingLoss(model, mini_batch_size=3),
        ),
        (
            "cached",
            ("--mini-batch-tokens", 20),
            lambda model: losses.CachedMultiVectorMultipleNegativesRankingLoss(model, mini_batch_num_tokens=20),
        ),
        (
            "distillation",
            ("--temperature", 0.5),
            lambda model: losses.MultiVectorDistillKLDivLoss(model, temperature=0.5),
        ),
    ],
    ids=["contrastive", "cached", "tokens", "distillation"],
)
def test_train_does_what_the_hosts_trainer_does_through_fused_scores(
    kind, options, loss, pylate_checkpoint, pairs, lists, tmp_path, monkeypatch
):
    if kind == "distillation":
        data = json.loads("[" + ",".join(lists.read_text().splitlines()) + "]")
        columns = {f"document_{n + 1}": [row["documents"][n] for row in data] for n in range(3)}
        rows = Dataset.from_dict({"query": QUERIES, **columns, "scores": [row["scores"] for row in data]})
    else:
        rows = Dataset.from_dict({"query": QUERIES, "positive": POSITIVES, "negative": NEGATIVES})
    sampler = {} if kind == "distillation" else {"batch_sampler": "no_duplicates"}
    expected = embeddings(trained_by_the_host(pylate_checkpoint, rows, loss, tmp_path / "host", **sampler))
    fused = []
    step = our_trainer.MultiVectorEncoderTrainer.training_step

    def observed(self, *args, **kwargs):
        fused.append(isinstance(self.loss, OURS))
        return step(self, *args, **kwargs)

    monkeypatch.setattr(our_trainer.MultiVectorEncoderTrainer, "training_step", observed)
    settings = ("--loss", kind, "--max-steps", STEPS, "--batch-size", BATCH, "--lr", 1e-3, "--seed", 7)
    data = lists if kind == "distillation" else pairs
    result = trained(data, pylate_checkpoint, tmp_path / "out", *settings, *options)
    assert f"{kind} loss, scorer pylate_flash, cpu" in result.stdout
    assert "note: " not in result.stderr
    assert fused == [True] * STEPS
    actual = embeddings(MultiVectorEncoder(str(tmp_path / "out"), device="cpu"))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
    assert (expected - embeddings(MultiVectorEncoder(str(pylate_checkpoint), device="cpu"))).abs().max() > 0.01

    fused.clear()
    if kind == "contrastive":
        trained(data, pylate_checkpoint, tmp_path / "torch", *settings, *options, "--scorer", "torch")
        assert fused == [False] * STEPS
        assert json.loads((tmp_path / "torch" / "config_sentence_transformers.json").read_text())["scorer"] == "torch"


def test_the_log_has_the_numbers_of_the_run(tiny_encoder, tmp_path):
    columns = {"query": QUERIES, "positive": POSITIVES, "negative": NEGATIVES}
    trainer = our_trainer.MultiVectorEncoderTrainer(
        model=tiny_encoder,
        args=MultiVectorEncoderTrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=4, logging_steps=1, use_cpu=True, report_to="none"
        ),
        train_dataset=Dataset.from_dict(columns),
    )
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["in_batch_negatives_per_query"] for entry in entries] == [7, 7]
    assert all(entry["tokens_per_second"] > 0 and entry["peak_memory_mib"] > 1 for entry in entries)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--scorer", "flash"), ["--scorer flash works with PyLate only", "pylate_flash, torch or auto"]),
        (
            ("--loss", "cached", "--mini-batch-tokens", "auto", "--scorer", "torch"),
            ["--mini-batch-tokens auto needs --scorer pylate_flash or auto, got torch"],
        ),
    ],
)
def test_what_its_models_do_not_take_is_one_sentence(options, parts, pylate_checkpoint, pairs, tmp_path):
    assert_one_clear_sentence(train(pairs, pylate_checkpoint, tmp_path / "out", *options), *parts)
    assert not (tmp_path / "out").exists()


def test_an_encoder_is_trained_before_it_is_searched(tiny_encoder_path, pairs, tmp_path):
    encoder = Path(tiny_encoder_path).with_name("bert")
    corpus = write(tmp_path / "corpus.jsonl", _id=["a", "b"], text=["red cat", "blue dog"])
    index = ("index", "--data", corpus, "--index", tmp_path / "index", *CPU, "--model")
    assert_one_clear_sentence(invoke(*index, encoder), "encoder without a projection", "pylate-flash train")
    assert not (tmp_path / "index").exists()
    trained(pairs, encoder, tmp_path / "out", "--max-steps", 1)
    succeed(*index, tmp_path / "out")
    assert len(succeed("search", "red", "--index", tmp_path / "index", *CPU).splitlines()) == 2


@pytest.mark.parametrize(
    ("expansion", "kwargs", "query"),
    [
        (None, {}, (None, 64)),
        (None, {"query_length": 5}, (5, 5)),
        ({"strategy": "min", "length": 8}, {"query_length": 5}, (5, 5)),
        ({"strategy": "min", "length": 8}, {"query_length": 12}, (12, 12)),
        ({"strategy": "fixed", "length": 8}, {"query_length": 12}, (12, 12)),
    ],
)
def test_lengths_of_queries(expansion, kwargs, query, tiny_encoder, tmp_path):
    """The configured length, and the number of tokens read; set again, they change nothing, as an index needs."""
    tiny_encoder.max_seq_length = 64
    tiny_encoder[0].query_expansion = expansion
    tiny_encoder.save_pretrained(str(tmp_path))
    model = load_model(str(tmp_path), device="cpu", **kwargs)
    assert (text_lengths(model).query_length, read_lengths(model)[0]) == query
    (long,) = encode(model, ["cat dog bird fish " * 20], is_query=True)
    assert len(long) == query[1]
    again = load_model(str(tmp_path), device="cpu", **text_lengths(model)._asdict())
    assert again[0].get_config_dict() == model[0].get_config_dict()


def test_an_index_searched_with_the_hosts_own_scorer(tiny_encoder, tmp_path):
    from pylate_flash import indexes, registered

    generator = torch.Generator().manual_seed(0)
    documents = [torch.randn(length, 16, generator=generator) for length in (3, 0, 7, 1, 5, 3)]
    queries = [torch.randn(length, 16, generator=generator) for length in (4, 2, 0)]
    index = indexes.Flat(tmp_path, "index", device="cpu", show_progress=False)
    index.add_documents([f"d{i}" for i in range(6)], documents)
    for subset in (None, [["d0", "d1", "d4"], ["d2"], ["d3", "d5"]]):
        index.scorer = "pylate_flash"
        ours = index(queries, k=4, subset=subset)
        index.scorer = "torch"
        theirs = index(queries, k=4, subset=subset)
        with registered("sentence-transformers"):
            assert index(queries, k=4, subset=subset) == theirs
        for mine, other in zip(ours, theirs, strict=True):
            assert [result["id"] for result in mine] == [result["id"] for result in other]
            scores = [result["score"] for result in mine]
            assert scores == pytest.approx([result["score"] for result in other], rel=1e-5, abs=1e-6)
