"""The trainer: what short runs of a tiny model log and save."""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pylate.losses
import pylate.models
import pytest
import torch
from datasets import Dataset, DatasetDict
from pylate.utils import ColBERTCollator, KDProcessing
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.evaluation import SentenceEvaluator
from sentence_transformers.training_args import BatchSamplers

from pylate_flash import losses, models
from pylate_flash.trainer import ColBERTTrainer, ColBERTTrainingArguments
from pylate_flash.training import contrast

TOPICS = ["sorting", "hashing", "parsing", "reading", "writing", "joining", "slicing", "mapping"]
TOPICS += ["folding", "caching", "testing", "logging"]


def tiny(path: str, **flags) -> models.ColBERT:
    return models.ColBERT(path, device="cpu", query_length=8, document_length=16, **flags)


@pytest.fixture
def model(tiny_colbert_path: str) -> models.ColBERT:
    return tiny(tiny_colbert_path)


@pytest.fixture
def pairs() -> Dataset:
    columns = {"query": "what is {}?", "positive": "{}, in short, is explained here."}
    return Dataset.from_dict({name: [text.format(topic) for topic in TOPICS] for name, text in columns.items()})


@pytest.fixture
def triplets(pairs: Dataset) -> Dataset:
    return pairs.add_column("negative", [f"nothing on {topic}" for topic in reversed(TOPICS)])


@pytest.fixture
def distillation() -> Dataset:
    ids = ["q0", "q1", "q2", "q3"]
    queries = Dataset.from_dict({"query_id": ids, "text": [f"what is {t}?" for t in TOPICS[:4]]})
    documents = Dataset.from_dict({"document_id": [f"d{i}" for i in range(12)], "text": TOPICS})
    candidates = [[f"d{(i + j) % 12}" for j in range(3)] for i in range(4)]
    train = Dataset.from_dict({"query_id": ids, "document_ids": candidates, "scores": [[0.9, 0.3, 0.1]] * 4})
    train.set_transform(KDProcessing(queries=queries, documents=documents).transform)
    return train


def arguments(tmp_path: Path, **overrides) -> ColBERTTrainingArguments:
    lengths = {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1}
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    return ColBERTTrainingArguments(**{"output_dir": str(tmp_path / "run")} | lengths | quiet | overrides)


@pytest.fixture
def trainer(model: models.ColBERT, pairs: Dataset, tmp_path: Path) -> Callable[..., ColBERTTrainer]:
    """Factory of trainers; defaults are the model, the pairs and `arguments(tmp_path)`, which `changes` override."""

    def make(
        loss: Any = None, data: Any = pairs, model: Any = model, own: dict | None = None, args: Any = None, **changes
    ) -> ColBERTTrainer:
        args = args or arguments(tmp_path, **changes)
        return ColBERTTrainer(model=model, args=args, train_dataset=data, loss=loss, **own or {})

    return make


def training_logs(trainer: ColBERTTrainer) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def trained(trainer: ColBERTTrainer) -> list[dict[str, float]]:
    """Train and return the logged entries."""
    trainer.train()
    return training_logs(trainer)


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def saved_config(folder: str | Path) -> dict:
    return json.loads((Path(folder) / "config_sentence_transformers.json").read_text())


class Clock:
    """Replaces the module `time`; the test advances the time."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("pylate_flash.training.trainer_mixin.time", clock)
    return clock


class Observed(losses.Contrastive):
    """A contrastive loss that takes 2 seconds and counts its tokens."""

    def __init__(self, *args, clock: Clock, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.clock = clock
        self.tokens: list[int] = []

    def forward(self, sentence_features, labels=None):
        self.clock.now += 2
        self.tokens.append(sum(int(features["attention_mask"].sum()) for features in sentence_features))
        return super().forward(sentence_features, labels)


class SlowEvaluator(SentenceEvaluator):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def __call__(self, model, output_path=None, epoch=-1, steps=-1) -> dict[str, float]:
        self.clock.now += 1000
        return {"nothing": 0.0}


Make = Callable[..., ColBERTTrainer]


def test_training_learns_and_saves_the_flag(trainer: Make, model: models.ColBERT, tmp_path: Path) -> None:
    flags = {"scorer": "pylate_flash", "masking": "zero"}
    instance = trainer(max_steps=5, **flags, save_strategy="steps", save_steps=5, seed=1)
    assert isinstance(instance.loss, losses.Contrastive)
    assert isinstance(instance.data_collator, ColBERTCollator)
    before = weights_of(model)
    entries = trained(instance)
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5]
    assert entries[-1]["loss"] < entries[0]["loss"]
    assert not torch.equal(weights_of(model), before)

    instance.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "run" / "checkpoint-5", tmp_path / "saved"):
        assert saved_config(folder)["scorer"] == "pylate_flash"
        loaded = models.ColBERT(str(folder), device="cpu")
        assert (loaded.scorer, loaded.masking) == ("pylate_flash", "zero")
        pylate.models.ColBERT(str(folder), device="cpu")


def test_same_steps_as_sentence_transformers_trainer(tiny_colbert_path: str, triplets: Dataset, tmp_path: Path) -> None:
    """Only the logs differ: the same loss and data give the same weights."""
    weights = []
    for trainer_class in (SentenceTransformerTrainer, ColBERTTrainer):
        model = tiny(tiny_colbert_path)
        own = {"data_collator": ColBERTCollator(model.tokenize)} if trainer_class is SentenceTransformerTrainer else {}
        args, loss = (
            arguments(tmp_path, batch_sampler="no_duplicates"),
            losses.CachedContrastive(model, mini_batch_size=2),
        )
        trainer_class(model=model, args=args, train_dataset=triplets, loss=loss, **own).train()
        weights.append(weights_of(model))
    assert torch.equal(*weights)


def test_logged_numbers(
    trainer: Make, model: models.ColBERT, triplets: Dataset, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two log entries of two steps of two batches each; evaluation after every step does not count as training time."""
    loss = Observed(model, clock=clock)
    monkeypatch.setattr("pylate_flash.training.trainer_mixin._peak_memory", lambda device: 3 * 2**20)
    steps = {"max_steps": 4, "logging_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 3}
    with pytest.warns(UserWarning, match="gradient_accumulation_steps=2"):
        instance = trainer(
            loss, triplets, own={"evaluator": SlowEvaluator(clock)}, **steps, eval_strategy="steps", eval_steps=1
        )
    entries = trained(instance)
    assert clock.now == 8 * 2 + 4 * 1000
    assert len(loss.tokens) == 8
    assert [entry["step"] for entry in entries] == [2, 4]
    for entry, tokens in zip(entries, (loss.tokens[:4], loss.tokens[4:]), strict=True):
        assert entry["tokens_per_second"] == round(sum(tokens) / 8, 1)
        assert entry["in_batch_negatives_per_query"] == 3 * 2 - 1
        assert entry["peak_memory_mib"] == 3.0
    other_entries = [entry for entry in instance.state.log_history if "loss" not in entry]
    assert other_entries
    assert not any("tokens_per_second" in entry for entry in other_entries)


def operation_of(name: str) -> str:
    return "maxsim_kl_divergence" if name == "Distillation" else "maxsim_cross_entropy"


@pytest.mark.parametrize(("name", "passes"), [("Contrastive", 2), ("CachedContrastive", 4), ("Distillation", 2)])
def test_the_share_of_the_loss(
    trainer: Make, model: models.ColBERT, pairs: Dataset, distillation: Dataset, name: str, passes: int, clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The op takes 0.5 s, each encoder pass 1 s; evaluation does not count."""
    monkeypatch.setattr("pylate_flash.training.contrast.time", clock)
    compute = getattr(contrast, operation_of(name))

    def pass_time(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(
        contrast, operation_of(name), lambda *args, **kwargs: pass_time(0.5) or compute(*args, **kwargs)
    )
    model[0].register_forward_pre_hook(lambda *_: pass_time(1.0))
    data = distillation if name == "Distillation" else pairs
    instance = trainer(
        getattr(losses, name)(model), data, own={"eval_dataset": data}, eval_strategy="steps", eval_steps=1
    )
    assert [entry["loss_time_share"] for entry in trained(instance)] == [round(0.5 / (passes + 0.5), 4)] * 2


def test_no_share_of_a_loss_from_elsewhere(trainer: Make, model: models.ColBERT) -> None:
    assert "loss_time_share" not in trained(trainer(pylate.losses.Contrastive(model), max_steps=1))[0]


def test_negatives_of_a_short_last_batch_are_averaged(trainer: Make, model: models.ColBERT, clock: Clock) -> None:
    (entry,) = trained(trainer(Observed(model, clock=clock), logging_steps=2, per_device_train_batch_size=8))
    assert entry["in_batch_negatives_per_query"] == ((8 - 1) + (4 - 1)) / 2


def test_peak_memory_is_this_process(trainer: Make) -> None:
    (entry,) = trained(trainer(max_steps=1))
    # More than the weights, in MiB and not KiB, and less than a machine has.
    assert 50 < entry["peak_memory_mib"] < 2**20
    assert entry["tokens_per_second"] > 0


@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive"])
def test_gradient_accumulation_is_warned_about_once(
    trainer: Make, model: models.ColBERT, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING, "pylate_flash"):
        warnings.simplefilter("always")
        trainer(getattr(losses, name)(model), gradient_accumulation_steps=4)
    for messages in ([str(w.message) for w in caught], caplog.messages):
        (message,) = [m for m in messages if "gradient_accumulation_steps=4" in m]
        assert f"{name} more in-batch negatives" in message
        assert "losses.CachedContrastive(model, mini_batch_size=4)" in message
        assert "per_device_train_batch_size=16" in message


def test_no_warning_where_accumulation_is_fine(trainer: Make, model: models.ColBERT, distillation: Dataset) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer()
        trainer(losses.Distillation(model), distillation, gradient_accumulation_steps=2)


@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive", "Distillation"])
def test_under_bf16_the_loss_is_computed_in_it_and_is_the_same(
    trainer: Make, model: models.ColBERT, triplets: Dataset, distillation: Dataset, name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """accelerate passes the loss float32 embeddings, outside autocast, whose values are bfloat16."""
    values, compute = [], getattr(contrast, operation_of(name))

    def in_float32(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def compared(*args, **kwargs):
        assert torch.is_autocast_enabled("cpu")
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            exact = compute(*map(in_float32, args), **{name: in_float32(value) for name, value in kwargs.items()})
        value = compute(*args, **kwargs)
        values.append((value.item(), exact.item()))
        return value

    monkeypatch.setattr(contrast, operation_of(name), compared)
    options = {"temperature": 0.2} if name != "Distillation" else {}
    data = distillation if name == "Distillation" else triplets
    trainer(getattr(losses, name)(model, **options), data, bf16=True).train()
    assert len(values) == 2
    for value, exact in values:
        assert value == pytest.approx(exact, rel=1e-5)
        assert value > 0


def test_distillation_on_kd_columns(trainer: Make, model: models.ColBERT, distillation: Dataset) -> None:
    entries = trained(trainer(losses.Distillation(model), distillation))
    assert len(entries) == 2
    for entry in entries:
        assert entry["loss"] > 0
        assert entry["tokens_per_second"] > 0
        assert "in_batch_negatives_per_query" not in entry


def test_a_loss_for_each_dataset(
    trainer: Make, model: models.ColBERT, triplets: Dataset, distillation: Dataset
) -> None:
    instance = trainer(
        {"triplets": losses.Contrastive(model), "distillation": losses.Distillation(model)},
        DatasetDict(triplets=triplets, distillation=distillation),
        max_steps=4, logging_steps=4, multi_dataset_batch_sampler="round_robin",
    )  # fmt: skip
    assert instance.args.batch_sampler == BatchSamplers.BATCH_SAMPLER
    (entry,) = trained(instance)
    # Averaged over the triplets' batches only: queries of the other data set have no in-batch negatives.
    assert entry["in_batch_negatives_per_query"] == 2 * 4 - 1


def test_default_batch_sampler(
    trainer: Make, model: models.ColBERT, pairs: Dataset, distillation: Dataset, tmp_path: Path
) -> None:
    def sampler(*inputs, **changes) -> BatchSamplers:
        return trainer(*inputs, **changes).args.batch_sampler

    assert sampler(losses.Contrastive(model)) == BatchSamplers.NO_DUPLICATES
    assert sampler(losses.Distillation(model), distillation) == BatchSamplers.BATCH_SAMPLER
    assert sampler(losses.Contrastive(model), pairs.to_iterable_dataset()) == BatchSamplers.BATCH_SAMPLER
    assert sampler(losses.Contrastive(model), batch_sampler="batch_sampler") == BatchSamplers.BATCH_SAMPLER
    reused = arguments(tmp_path)
    trainer(args=reused)
    assert sampler(losses.Distillation(model), distillation, args=reused) == BatchSamplers.BATCH_SAMPLER


def test_a_batch_sampler_is_the_default_until_one_is_named(trainer: Make, tmp_path: Path) -> None:
    """Also in copies of the arguments, and if it is set later."""
    args = arguments(tmp_path)
    copies = [dataclasses.replace(args, max_steps=3), pickle.loads(pickle.dumps(args))]
    assert args.to_dict()["batch_sampler"] == "batch_sampler"
    for copy in copies:
        assert trainer(args=copy).args.batch_sampler == BatchSamplers.NO_DUPLICATES
    args.batch_sampler = BatchSamplers.GROUP_BY_LABEL
    named = dataclasses.replace(copies[0], batch_sampler="batch_sampler")
    for inputs, expected in ((args, "group_by_label"), (named, "batch_sampler")):
        assert trainer(args=inputs).args.batch_sampler == expected


def test_the_arguments_make_full_batches_in_any_trainer(model: models.ColBERT, pairs: Dataset, tmp_path: Path) -> None:
    """Also in sentence-transformers' own trainer, which does not know about an unset batch sampler."""
    args = arguments(tmp_path)
    assert args.batch_sampler == BatchSamplers.BATCH_SAMPLER
    kwargs = {"loss": losses.Contrastive(model), "data_collator": ColBERTCollator(model.tokenize)}
    batches = SentenceTransformerTrainer(model=model, args=args, train_dataset=pairs, **kwargs).get_train_dataloader()
    assert [len(batch["query_input_ids"]) for batch in batches] == [4, 4, 4]


def test_repeated_documents_do_not_meet_in_a_batch(trainer: Make) -> None:
    """Every positive occurs twice; as in-batch negatives they would push the model away from the right answer."""
    twice = Dataset.from_dict({"query": [f"q {i}" for i in range(8)], "positive": [f"d {i // 2}" for i in range(8)]})
    for batch in trainer(data=twice).get_train_dataloader():
        documents = batch["positive_input_ids"]
        assert len(documents.unique(dim=0)) == len(documents)


def test_plain_pylate_model_gives_the_flag_to_the_losses(trainer: Make, tiny_colbert_path: str, tmp_path: Path) -> None:
    plain = pylate.models.ColBERT(tiny_colbert_path, device="cpu", query_length=8, document_length=16)
    flags = {"model": plain, "max_steps": 1, "scorer": "torch", "masking": "zero"}
    instance = trainer(losses.Contrastive, **flags)
    assert (instance.loss.scorer, instance.loss.masking) == ("torch", "zero")
    loss = losses.Contrastive(plain, scorer="pylate_flash")
    trainer(loss, **flags)
    assert (loss.scorer, loss.masking) == ("pylate_flash", "zero")
    instance.train()
    instance.save_model(str(tmp_path / "saved"))
    assert "scorer" not in saved_config(tmp_path / "saved")


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kind_of_loss", [losses.Contrastive, losses.CachedContrastive])
def test_training_from_hidden_states_is_the_same(
    trainer: Make, plain: bool, kind_of_loss: type, tiny_colbert_path: str
) -> None:
    """For each loss, also for a model without flags."""
    runs = []
    for fuse_projection in (None, True):
        kind = pylate.models.ColBERT if plain else models.ColBERT
        model = kind(tiny_colbert_path, device="cpu", query_length=8, document_length=16)
        instance = trainer(kind_of_loss, model=model, max_steps=3, seed=1, fuse_projection=fuse_projection)
        logged = torch.tensor([entry["loss"] for entry in trained(instance)])
        assert bool(getattr(model, "fuse_projection", instance.loss.fuse_projection)) == bool(fuse_projection)
        runs.append((logged, model[1].linear.weight.detach()))
    (logged, weight), (fused_logged, fused_weight) = runs
    assert len(logged) == 3
    torch.testing.assert_close(fused_logged, logged, rtol=1e-4, atol=1e-4)
    # Encoder weights are not compared: some encoder gradients are rounding noise, which Adam scales up.
    torch.testing.assert_close(fused_weight, weight, rtol=1e-3, atol=1e-4)


def test_a_scorer_that_no_loss_follows_is_an_error(
    trainer: Make, model: models.ColBERT, tiny_colbert_path: str, tmp_path: Path
) -> None:
    for followed in (model, pylate.models.ColBERT(tiny_colbert_path, device="cpu")):
        with pytest.raises(ValueError, match="args: scorer='pylate_flash'.*Contrastive.*pylate_flash.losses"):
            trainer(pylate.losses.Contrastive(followed), model=followed, scorer="pylate_flash")
    assert model.scorer == "auto"
    for wrong, expected in (({"scorer": "cuda"}, "scorer.*got 'cuda'"), ({"masking": "no"}, "masking.*got 'no'")):
        with pytest.raises(ValueError, match=expected):
            arguments(tmp_path, **wrong)


def test_a_scorer_that_cannot_run_here_is_not_replaced(trainer: Make) -> None:
    with pytest.raises(RuntimeError, match="flash"):
        trainer(scorer="flash").train()


def test_model_init(trainer: Make, tiny_colbert_path: str) -> None:
    instance = trainer(model=None, own={"model_init": lambda: tiny(tiny_colbert_path)}, scorer="torch")
    assert len(trained(instance)) == 2
    assert instance.model.scorer == "torch"
    assert instance.loss.model is instance.model


def test_resume_keeps_the_flag(trainer: Make, tiny_colbert_path: str, tmp_path: Path) -> None:
    def saving(scorer: str | None, max_steps: int, own: str | None = None) -> ColBERTTrainer:
        steps = {"max_steps": max_steps, "save_strategy": "steps", "save_steps": 1}
        return trainer(model=tiny(tiny_colbert_path, scorer=own), scorer=scorer, **steps)

    saving("torch", max_steps=1).train()
    checkpoint = str(tmp_path / "run" / "checkpoint-1")
    for arguments_scorer, own, expected in (
        (None, None, "torch"),
        ("pylate_flash", None, "pylate_flash"),
        (None, "pylate_flash", "pylate_flash"),
    ):
        resumed = saving(arguments_scorer, max_steps=2, own=own)
        resumed.train(resume_from_checkpoint=checkpoint)
        assert resumed.state.global_step == 2
        assert resumed.model.scorer == expected
        assert saved_config(tmp_path / "run" / "checkpoint-2")["scorer"] == expected
        assert [entry["step"] for entry in training_logs(resumed)] == [1, 2]


def test_arguments_of_sentence_transformers(trainer: Make, model: models.ColBERT, tmp_path: Path) -> None:
    args = SentenceTransformerTrainingArguments(
        str(tmp_path), max_steps=1, logging_steps=1, report_to="none", use_cpu=True, save_strategy="no", bf16=True
    )
    (entry,) = trained(trainer(losses.CachedContrastive(model), args=args))
    assert entry["in_batch_negatives_per_query"] == 7
    assert torch.isfinite(torch.tensor(entry["loss"]))


def test_arguments_of_another_kind_are_named(model: models.ColBERT, pairs: Dataset, tmp_path: Path) -> None:
    args = ColBERTTrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    for arguments, message in (
        ({"model": "folder/of-a-model"}, "model: str; expected a ColBERT model"),
        ({"loss": "Contrastive"}, "loss: str; expected a loss, a function of the model, or a dictionary"),
        ({"loss": {"a": 1}}, "loss: int; expected a loss, a function of the model, or a dictionary"),
        ({"train_dataset": [pairs[0]]}, "train_dataset: list; expected a Dataset of datasets, or a dictionary"),
        ({"eval_dataset": {"a": "text"}}, "eval_dataset: str; expected a Dataset of datasets, or a dictionary"),
    ):
        with pytest.raises(TypeError, match=f"^{message}"):
            ColBERTTrainer(**{"model": model, "args": args, "train_dataset": pairs, **arguments})


def test_prompts_reach_the_collator(trainer: Make, model: models.ColBERT, pairs: Dataset) -> None:
    batch = trainer(prompts={"query": "search: "}).data_collator([pairs[0]])
    plain = model.tokenize(["search: " + pairs[0]["query"]], is_query=True, pad=True)
    assert torch.equal(batch["query_input_ids"], plain["input_ids"])


def test_a_query_column_with_another_name_is_pointed_out(
    trainer: Make, pairs: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    for name, warned in (("question", True), ("anchor", False)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "pylate_flash"):
            trainer(data=pairs.rename_column("query", name))
        assert any("encodes it as documents" in message for message in caplog.messages) is warned
