"""Recipes: what is read is what is written, and a mistake is one sentence."""

import dataclasses
import tomllib
from pathlib import Path

import pytest

from fedveil import Baffle, BaffleEpochs, CohortSampler, DpSgd, FedProx, Recipe, Scaffold, ServerOptimizer
from fedveil.runs import recipe
from fedveil.runs.recipe import SplitSpec, TaskSpec, parse, read

BASE = """
rounds = 3
[split]
clients = 4
[method]
name = "fedprox"
mu = 0.5
[method.local]
lr = 0.2
"""


def again(plan: Recipe) -> Recipe:
    return parse(tomllib.loads(plan.toml()))


@pytest.mark.parametrize("name", recipe.names())
def test_a_built_in_recipe_is_read_and_written_without_loss(name: str) -> None:
    plan = read(name)
    assert again(plan) == plan
    assert plan.task.data.split("-")[0] == name.split("/")[0]


def test_every_kind_of_value_survives_the_writing() -> None:
    plan = Recipe(
        seed=-7,
        target=0.5,
        task=TaskSpec(
            data='a "quoted"\\ päth\n\x7f 😀.npz',
            data_options={"size": [8, 8], "mean": [0.5, 1e-7], "on": True},
            model_options={"width": 3},
        ),
        split=SplitSpec("natural"),
        cohort=CohortSampler(quorum=0.5, deadline=1.5),
        method=FedProx(mu=1e-12),
    )
    assert again(plan) == plan


def test_defaults_are_spelled_out_and_unset_values_left_out() -> None:
    table = tomllib.loads(Recipe().toml())
    assert table["method"]["local"]["batch"] == 32
    assert table["method"]["name"] == "fedavg"
    assert "steps" not in table["method"]["local"]
    assert "target" not in table


def test_a_recipe_lies_over_the_one_it_is_like(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "deep").mkdir()
    own = tmp_path / "deep" / "own.toml"
    own.write_text('like = "../base.toml"\nseed = 5\n[method.local]\nepochs = 7\n')
    plan = read(str(own))
    assert (plan.rounds, plan.seed, plan.split.clients) == (3, 5, 4)
    assert isinstance(plan.method, FedProx)
    assert (plan.method.mu, plan.method.local.lr, plan.method.local.epochs) == (0.5, 0.2, 7)


def test_an_own_recipe_may_be_like_a_built_in_one(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('like = "digits/scaffold-classes"\nrounds = 2\n')
    plan = read(str(own))
    assert plan == dataclasses.replace(read("digits/scaffold-classes"), rounds=2)
    assert isinstance(plan.method, Scaffold)
    assert plan.split.classes == 2


def test_a_circle_of_recipes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('like = "b.toml"')
    (tmp_path / "b.toml").write_text('like = "a.toml"')
    with pytest.raises(ValueError, match="never in a circle"):
        read(str(tmp_path / "a.toml"))


def test_changes_are_laid_on_top() -> None:
    plan = read("digits/fedavg", ["rounds=2", "method.name=fedprox", "method.mu = 1", "task.model_options.width=3"])
    assert plan.rounds == 2
    assert isinstance(plan.method, FedProx)
    assert plan.method.mu == 1.0
    assert plan.method.local.lr == 0.3  # still the recipe's own
    assert plan.task.model_options == {"width": 3}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("rounds", "--set takes key=value, not 'rounds'"),
        ("=3", "--set takes key=value"),
        ("roundz=3", "unknown key 'roundz'; did you mean 'rounds'?"),
        ("method.local.lrr=1", "unknown key 'method.local.lrr'; did you mean 'method.local.lr'?"),
        ("rounds=many", "'rounds' is 'many'; it must be a whole number"),
        ("rounds=true", "'rounds' is True; it must be a whole number"),
        ("rounds=0", "rounds and evaluate_every are at least 1"),
        ("rounds.x=1", "'rounds' is a value, so it has no 'x'"),
        ("target=2", "target is 2; it is a test accuracy"),
        ("target=high", "'target' is 'high'; it must be a number"),
        ("method.local.lr=nan", "'method.local.lr' is nan; it must be a finite number"),
        ("cohort.deadline=inf", "'cohort.deadline' is inf; it must be a finite number"),
        ("split=iid", r"'split' holds several keys \(kind, .*\); write 'split.KEY'"),
        ("method.name=fedaverage", "there is no method 'fedaverage'; did you mean 'fedavg'?"),
        ("method.name=[1]", r"there is no method '\[1\]'"),
        ("task.loss=hinge", "task.loss is 'hinge'; use cross-entropy or next-character"),
        ("task.data_options=3", "'task.data_options' is 3; it must be a table"),
        ("cohort.kind=odd", "cohort.kind is 'odd'; use uniform, weighted or poisson"),
    ],
)
def test_a_wrong_change_is_one_sentence(change: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        read("digits/fedavg", [change])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "change", "sentence"),
    [
        ("fedavg", "server.momentum=1.0", r"server\.momentum, server\.beta2 and server\.ema must be from 0 to below 1"),
        ("fedavg", "server.beta2=-0.1", r"server\.momentum, server\.beta2 and server\.ema must be from 0 to below 1"),
        ("fedavg", "server.ema=1.0", r"server\.momentum, server\.beta2 and server\.ema must be from 0 to below 1"),
        ("fedavg", "server.tau=0.0", r"server\.tau above 0"),
        ("fedavg", "local.momentum=1.0", r"local\.momentum and local\.beta2 are from 0 to below 1"),
        ("fedavg", "local.beta2=-0.1", r"local\.momentum and local\.beta2 are from 0 to below 1"),
        ("fedavg", "local.weight_decay=-0.1", r"local\.weight_decay is at least 0"),
        ("fedavg", "local.decay=0.0", r"local\.decay above 0"),
        ("fedavg", "local.decay_after=5", r"'method\.local\.decay_after' is 5; it must be a list of whole numbers"),
        ("fedavg", "local.decay_after=[5]", r"local\.decay_after is \[5\], with local\.decay 1; .* other than 1"),
        ("fedavg", "local={decay = 0.2, decay_after = [5, 3]}", r"local\.decay_after is \[5, 3\], .* increasing order"),
        ("fedavg", "local={decay = 0.2, decay_after = [0]}", r"local\.decay_after is \[0\], .* rounds from 1"),
        ("fedprox", "mu=-1.0", r"method\.mu is -1; it is 0 or more"),
        ("fedprox", "full_rounds=-1", r"method\.full_rounds is -1; it is 0 or more"),
        ("scaffold", "server.lr=0.0", r"server\.lr is 0; it must be above 0"),
        ("fedsynth", "up.step=-0.1", "fedsynth needs step > 0"),
        ("fedsynth", "up.decay=1.5", "0 < decay <= 1"),
    ],
)
def test_a_value_out_of_its_range_is_one_sentence(method: str, change: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read("digits/fedavg", ["method={}", f"method.name={method}", f"method.{change}"])


@pytest.mark.parametrize(
    ("method", "key", "sentence"),
    [
        ("q-fedavg", "privacy", "a client's weight h_k is its loss on all its records, which no noise covers; use"),
        ("q-fedavg", "user_privacy", "clients weight their updates by their loss, so nothing bounds a client's part"),
        ("baffle-epochs", "privacy", "it measures the loss of a whole batch, in which no record's part is clipped"),
        ("feddm", "privacy", "means of features are matched without clip or noise"),
        ("fedlap", "user_privacy", "a set of images is no update that could be cut to a norm and summed"),
        ("baffle", "user_privacy", "it clips and noises updates, and baffle sends slopes of the loss"),
    ],
)
def test_where_privacy_is_no_key_a_sentence_says_why(method: str, key: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{method} has no '?method.{key}'?: {sentence}"):
        parse({"method": {"name": method, key: {"noise": 1.0}}})


def test_both_vectors_of_scaffold_may_be_private_for_each_client() -> None:
    method = parse({"method": {"name": "scaffold", "user_privacy": {"noise": 1.0}}}).method
    assert isinstance(method, Scaffold)
    assert method.user_privacy


def test_a_key_of_others_is_no_misspelling() -> None:
    told = r"^fedlap has no 'method.user_privacy'.*; it is a key of baffle-epochs, fedage, fedavg, "
    with pytest.raises(ValueError, match=told) as caught:
        parse({"method": {"name": "fedlap", "user_privacy": {}}})
    assert "q-fedavg" not in str(caught.value)  # it has the key only to say why it cannot use it
    with pytest.raises(ValueError, match=r"^raw has no 'method\.up\.points'; it is a key of tofu$"):
        parse({"method": {"name": "fedavg", "up": {"points": 3}}})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"rounds =", "own.toml is not valid TOML"),
        (b"name = '\xff'", "own.toml is not valid TOML"),
        (b"like = 3", "'like' names one other recipe"),
        (b"like = 'digits/fedavgg'", "no recipe 'digits/fedavgg'; did you mean 'digits/fedavg'?"),
        (b"like = 'gone.toml'", "there is no recipe file .*gone.toml"),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, text: bytes, sentence: str) -> None:
    (tmp_path / "own.toml").write_bytes(text)
    with pytest.raises(ValueError, match=sentence) as caught:
        read(str(tmp_path / "own.toml"))
    assert "\n" not in str(caught.value)


def test_an_unknown_name_or_file_is_one_sentence() -> None:
    with pytest.raises(ValueError, match="there is no recipe 'zzz'; "):
        read("zzz")
    with pytest.raises(ValueError, match=r"there is no recipe file zzz\.toml"):
        read("zzz.toml")


def test_a_recipe_builds_its_task() -> None:
    task = read("digits/fedavg", ["split.clients=3", "split.kind=dirichlet", "split.alpha=0.5"]).build()
    assert len(task.clients) == 3
    assert task.clients.kind == "dirichlet"
    assert task.layout.size == 20010


@pytest.mark.parametrize("name", ["tpu", "cudax"])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"device '{name}' is not known"):
        recipe.pick_device(name)


# ---------------------------------------------------------------------------------------------------- none


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        ("digits/fedavg", "target=none", lambda plan: plan.target),
        ("digits/fedavg-2class", "split.max_records=none", lambda plan: plan.split.max_records),
        ("digits/fedavg", "task.weights=none", lambda plan: plan.task.weights),
        ("digits/dp-fedavg", "method.privacy=none", lambda plan: plan.method.privacy),
        ("digits/fedavg-secure", "method.secure = none", lambda plan: plan.method.secure),
        ("digits/baffle", "method.clip=none", lambda plan: plan.method.clip),
        ("digits/baffle", 'method.clip="none"', lambda plan: plan.method.clip),
    ],
)
def test_none_unsets_an_optional_key_and_a_written_recipe_keeps_it(name, change, found):
    plan = recipe.read(name, ["target=0.5", change])
    assert found(plan) is None
    assert recipe.parse(tomllib.loads(plan.toml())) == plan


def test_none_unsets_what_a_recipe_inherits(tmp_path):
    base, own = tmp_path / "base.toml", tmp_path / "own.toml"
    base.write_text("target = 0.5\n[method]\nname = 'fedavg'\n[method.privacy]\nnoise = 2.0\n")
    own.write_text("like = 'base.toml'\n")
    assert recipe.read(str(own)).method.privacy.noise == 2
    plan = recipe.read(str(own), ["method.privacy=none", "target=none"])
    assert (plan.method.privacy, plan.target) == (None, None)
    own.write_text("like = 'base.toml'\ntarget = 'none'\n[method]\nprivacy = 'none'\n")
    assert recipe.read(str(own)) == plan
    again = recipe.read(str(own), ["method.privacy=none", "method.privacy.clip=3.0"])
    assert again.method.privacy == DpSgd(clip=3.0)


def test_none_is_text_where_a_key_takes_text_and_in_quotes():
    assert recipe.read("digits/fedavg", ['task.weights="none"']).task.weights == "none"
    with pytest.raises(ValueError, match=r"task\.loss is 'none'"):
        recipe.read("digits/fedavg", ["task.loss=none"])
    plan = recipe.read("digits/fedavg", ["task.model_options.width=4", "task.model_options.width=none"])
    assert plan.task.model_options == {}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("rounds=none", "'rounds' is none; it must be a whole number"),
        ("method.local.lr=none", r"'method\.local\.lr' is none; it must be a number"),
        ("method.local=none", r"'method\.local' cannot be none; leave it out for its default"),
    ],
)
def test_a_key_that_cannot_be_unset_is_one_sentence(change, told):
    with pytest.raises(ValueError, match=told):
        recipe.read("digits/fedavg", [change])


def test_a_part_of_a_table_keeps_the_rest_of_the_methods_default():
    usual = Baffle().server
    changed = recipe.parse({"method": {"name": "baffle", "server": {"lr": 0.5}}}).method.server
    assert changed == dataclasses.replace(usual, lr=0.5)
    assert changed.optimizer == "adam"
    local = recipe.parse({"method": {"name": "baffle-epochs", "local": {"epochs": 3}}}).method.local
    assert local == dataclasses.replace(BaffleEpochs().local, epochs=3)


def test_a_table_with_another_optimizer_has_the_defaults_of_that_one():
    plain = recipe.parse({"method": {"name": "baffle", "server": {"optimizer": "plain"}}}).method.server
    assert plain == ServerOptimizer("plain")
    same = recipe.parse({"method": {"name": "baffle", "server": {"optimizer": "adam"}}}).method.server
    assert same == Baffle().server
