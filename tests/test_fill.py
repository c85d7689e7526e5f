"""Recipes, generator, certificate, budgets and the pins: what each promises, and refuses."""

from __future__ import annotations

import json
import shutil

import handmade
import pytest
import torch
import yaml
from decimals import right
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import mone_ref
from mone_ref import experts, validate
from mone_ref.cli import application
from mone_ref.errors import Rejected
from mone_ref.fill import certificate, fixture, generator, pins
from mone_ref.fill import recipe as recipes
from mone_ref.fill.golden import budget
from mone_ref.fill.recipe import RecipeError
from mone_ref.fill.variants import UNIT_ROUNDOFF, Variant, all_variants, permuted, variants
from mone_ref.loading import Model

SMALL = {**handmade.RECIPE, "name": "tiny"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A user's own recipe, filled with its control."""
    place = tmp_path_factory.mktemp("tiny")
    return fixture.fill_pair(recipes.parse(SMALL), place)


# -- generator


def test_the_generator_is_the_one_that_is_specified():
    # SHAKE-128 of "mone-ref 1|1|x" begins with these bytes (openssl dgst -shake128).
    stream = bytes.fromhex(PINNED_STREAM)
    signed = [byte - 256 if byte > 127 else byte for byte in stream]
    assert generator.integers(1, "x", 16).tolist() == signed
    values = generator.uniform(1, "x", (4, 4), -9)
    assert values.reshape(-1).tolist() == [k / 512 for k in signed]
    norms = generator.around_one(1, "x", (16,))
    assert norms.tolist() == [1 + (k // 4) / 128 for k in signed]


PINNED_STREAM = "d2dd9cb8de7c5187c8880a47feab9933"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype_loads_the_same_numbers(fixtures, dtype):
    for file in sorted(fixtures.glob("*/checkpoint/*.safetensors")):
        for tensor in load_file(file).values():
            assert torch.equal(tensor.to(dtype).double(), tensor.double())


# -- recipes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"family": "gpt"}, "$.family"),
        ({"seed": -1}, "$.seed"),
        ({"seed": True}, "$.seed"),
        ({"num_layers": 5}, "$.num_layers"),
        ({"hidden": 3}, "hidden"),
        ({"prompts": []}, "$.prompts"),
        ({"prompts": [64]}, "$.prompts"),
        ({"substitution": {"01": [1]}}, "01"),
        ({"substitution": {"0": [-1]}}, "$.substitution"),
        ({"substitution": [[1]]}, "$.substitution"),
        ({"constant_seeds": {"0.1": 5}}, "0.1"),
        ({"compute_types": ["int8"]}, "$.compute_types"),
        ({"name": "../out"}, "$.name"),
        ({"form": "both"}, "$.form"),
        ({"constant_prefix": "v"}, "form"),
        ({"shared_constants": [["0.0", "0.2"]]}, "form"),
        ({"form": "explicit", "shared_constants": [["0.0"]]}, "$.shared_constants"),
        ({"form": "explicit", "shared_constants": [["0.0", "0.1"]]}, "$.shared_constants: '0.1'"),
        ({"form": "explicit", "shared_constants": [["0.0", "0.2"], ["0.2", "0.0"]]}, "two groups"),
        (
            {
                "form": "explicit",
                "shared_constants": [["0.0", "0.2"]],
                "constant_seeds": {"0.2": 5},
            },
            "'0.2' is not the first",
        ),
        ({"shards": 1}, "$.shards"),
        ({"index": False}, "shards"),
    ],
)
def test_a_wrong_recipe_is_refused_with_the_field(change, words):
    with pytest.raises(RecipeError) as refusal:
        recipes.parse(SMALL | change)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("olmoe", "head_dim", 32),
        ("olmoe", "dense_layers", [0]),
        ("olmoe", "sparse_step", 2),
        ("mixtral", "normalise", False),
        ("mixtral", "normalise", True),
        ("mixtral", "dense_intermediate_size", 8),
    ],
)
def test_a_field_that_a_family_does_not_have_is_refused(family, field, value):
    with pytest.raises(RecipeError, match=rf"\$\.{field}: {family} has no "):
        recipes.parse(SMALL | {"family": family, field: value})


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_recipe_of_another_family_gives_a_clean_pair(tmp_path, family):
    sizes = {"head_dim": 24, "num_layers": 2, "substitution": {"1": [2, 0]}}
    dense = {"dense_layers": [0], "dense_intermediate_size": 20, "normalise": True}
    own = dense if family == "qwen3_moe" else {}
    recipe = recipes.parse(SMALL | sizes | own | {"family": family, "compute_types": ["float32"]})
    for one in fixture.fill_pair(recipe, tmp_path):
        assert validate.check(one.checkpoint).problems == ()
        model = mone_ref.load(one.checkpoint).config.model
        assert (model.family.name, model.head_dim) == (family, 24)
        assert model.router.normalise is True
        assert model.dense_layers == frozenset(own.get("dense_layers", []))


@pytest.mark.parametrize(
    "change",
    [
        {"substitution": {"0": [4]}},
        {"substitution": {"0": [1, 1]}},
        {"substitution": {"1": [1]}},
        {"substitution": {"0": [0, 1, 2, 3]}},
        {"top_k": 5},
        {"hidden_size": 34},
        {"num_kv_heads": 3},
    ],
)
def test_a_recipe_for_a_checkpoint_that_cannot_load_leaves_nothing_behind(tmp_path, change):
    with pytest.raises(Rejected):
        fixture.fill(recipes.parse(SMALL | change), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_that_shows_too_little_is_refused_and_leaves_nothing_behind(tmp_path):
    # Two tokens in one layer cannot show none, some and all.
    poor = recipes.parse(SMALL | {"prompts": [2]})
    with pytest.raises(RecipeError, match=r"no token with .* try another seed"):
        fixture.fill(poor, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_too_loud_for_float16_is_refused(tiny):
    loud = recipes.parse(SMALL)
    model = mone_ref.load(tiny[0].checkpoint)
    prompts = [[1, 2, 3]]
    certificate.check_headroom(loud, [Variant("float32", "plain", model)], prompts)
    model.weights.layers[0].mlp.experts.up *= 2.0**13
    with pytest.raises(RecipeError, match="float16"):
        certificate.check_headroom(loud, [Variant("float32", "plain", model)], prompts)
    quiet_claim = recipes.parse(SMALL | {"compute_types": ["float32"]})
    certificate.check_headroom(quiet_claim, [Variant("float32", "plain", model)], prompts)


def test_an_existing_directory_is_never_written_to(tmp_path):
    (tmp_path / "tiny").mkdir()
    with pytest.raises(RecipeError, match="exists already"):
        fixture.fill(recipes.parse(SMALL), tmp_path)
    assert list((tmp_path / "tiny").iterdir()) == []


def test_recipes_survive_their_own_file(fixtures, tmp_path):
    for path in sorted(fixtures.glob("*/recipe.yaml")):
        one = recipes.read(path)
        assert recipes.dump(one) == path.read_text()
        assert recipes.parse(yaml.safe_load(recipes.dump(one))) == one


# -- certificate


def uncertified(exact, runs, top_k):
    """First uncertified position of layers ``[L, T, E]`` whose every contest is in logits."""
    one, *others = ([(layer, top_k) for layer in run] for run in (exact, *runs))
    return certificate.first_uncertified(one, others)


def test_a_token_is_uncertified_when_errors_come_near_its_gap():
    exact = torch.tensor(
        [[[3.0, 1.0, 0.0], [3.0, 2.5, 0.0], [3.0, 1.0, 0.9]]]
    ).double()  # [1, 3, 3]
    assert certificate.selection_gap(exact, 1).tolist() == [[2.0, 0.5, 2.0]]
    assert certificate.selection_gap(exact, 3).tolist() == [[torch.inf] * 3]
    quiet = exact + 0.1
    assert uncertified(exact, [quiet], top_k=1) == 3
    off = exact.clone()
    off[0, 1, 2] += 0.125  # exactly a quarter of the gap of position 1
    assert uncertified(exact, [quiet, off], top_k=1) == 3
    off[0, 1, 2] += 0.001
    assert uncertified(exact, [quiet, off], top_k=1) == 1
    assert uncertified(exact, [exact], top_k=2) == 3
    assert uncertified(exact, [off], top_k=2) == 3
    assert uncertified(exact, [quiet], top_k=2) == 2
    off[0, 0, 0] = torch.nan
    assert uncertified(exact, [quiet, off], top_k=1) == 0


def test_one_layer_is_enough_to_reject_a_token():
    exact = torch.tensor([[[4.0, 0.0]], [[0.1, 0.0]]]).double()  # [2, 1, 2]
    assert uncertified(exact, [exact + 0.01], top_k=1) == 1
    assert uncertified(exact, [exact + 0.03], top_k=1) == 0


def test_every_pinned_prompt_is_certified_and_shows_all_kinds_of_tokens(fixtures):
    for directory in sorted(path.parent for path in fixtures.glob("*/recipe.yaml")):
        one = fixture.read(directory)
        oracle = mone_ref.load(one.checkpoint, torch.float64)
        pinned = one.golden()
        prompts = [pinned[f"prompt.{i}.ids"].tolist() for i in range(len(one.recipe.prompts))]
        assert [len(prompt) for prompt in prompts] == one.recipe.prompts
        runs = all_variants(one.checkpoint, tuple(one.recipe.compute_types))
        assert len(runs) == 8 * len(one.recipe.compute_types)
        for prompt in prompts:
            exact = certificate.contests(oracle, prompt)
            seen = [certificate.contests(run.model, prompt) for run in runs]
            assert certificate.first_uncertified(exact, seen) == len(prompt)
        certificate.check_coverage(one.recipe, oracle, prompts)


def test_constants_are_as_loud_as_experts(fixtures):
    """A quiet constant could be dropped unseen; a loud one would hide the experts.

    Experts of a narrow model are quieter: at hidden size 64 by a factor of two.
    """
    for directory in sorted(path.parent for path in fixtures.glob("*/recipe.yaml")):
        model = mone_ref.load(directory / "checkpoint", torch.float64)
        for layer in model.substitution.layers:
            moe = model.weights.layers[layer].mlp
            trace = {}
            model.score([list(range(16))], trace.__setitem__)
            x = trace[f"layers.{layer}.moe_in"]  # [T, H]
            outputs = [
                experts.mlp(x, moe.experts, row, model.precision)  # [T, H]
                for row in range(moe.experts.rows)
            ]
            loudness = moe.constants.square().mean().sqrt()
            assert 0.5 <= loudness / torch.stack(outputs).square().mean().sqrt() <= 2.5


# -- budgets


def test_a_budget_is_the_largest_run_floored_by_the_median_and_by_rounding():
    truth = torch.zeros(3, 2, dtype=torch.float64)
    logits = torch.full((3, 2), 8.0, dtype=torch.float64)
    runs = torch.tensor(
        [[[3.0, 4.0], [0.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 0.0], [2.0, 0.0]]]
    )
    token, top = budget(logits, truth, runs, unit=2.0**-3)
    # rms: sqrt(25/2), 0, sqrt(4/2); median sqrt(2); rounding 8 / 8 = 1
    assert right(["3.535533905933", "1.414213562373", "1.414213562373"], token.tolist())
    assert top.item() == 4.0
    token, top = budget(logits, truth, 0 * runs, unit=2.0**-3)
    assert token.tolist() == [1.0, 1.0, 1.0]
    assert top.item() == 1.0


def test_unit_roundoffs_are_those_of_the_types():
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        assert UNIT_ROUNDOFF[name] == torch.finfo(dtype).eps / 2
    assert UNIT_ROUNDOFF["float16"] == torch.finfo(torch.float16).eps / 2 == UNIT_ROUNDOFF["tf32"]


def test_permuted_runs_are_the_same_function(approx):
    """In float64 a permutation moves only the order of sums."""
    oracle = mone_ref.load(approx, torch.float64)
    prompt = [3, 14, 15, 92, 65, 35]
    truth = oracle.score([prompt])[0]
    for seed in (1, 2):
        other = Model(oracle.config, permuted(oracle, seed), oracle.precision)
        moved = (other.score([prompt])[0] - truth).abs().max() / truth.abs().max()
        assert 0 < moved <= fixture.GOLDEN_TOLERANCE


def test_variants_come_in_their_fixed_order(approx):
    assert [run.name for run in variants(approx, "bfloat16")] == [
        "plain",
        "router-softmax",
        "each-route",
        "residual-wide",
        "attention-wide",
        "wide-between-products",
        "permuted-1",
        "permuted-2",
    ]
    for name in ("float32", "tf32"):
        orders = [run.name for run in variants(approx, name)]
        assert orders == ["plain", *(f"permuted-{seed}" for seed in range(1, 8))]


# -- fixtures on disk


def test_pinned_fixtures_are_rebuilt_byte_for_byte(fixtures, tmp_path):
    # Two here; `make fixtures` rebuilds all.
    for name in ("olmoe-top20", "olmoe-twelve"):
        pinned = fixture.read(fixtures / name)
        again = fixture.fill(pinned.recipe, tmp_path)
        assert fixture.differences(pinned, again) == []


def test_a_control_shares_every_value_but_those_of_substituted_experts(fixtures):
    for directory in sorted(path.parent for path in fixtures.glob("*/recipe.yaml")):
        one = fixture.read(directory)
        if one.recipe.is_plain:
            continue
        stored = weights(one.directory)
        control = weights(fixtures / one.recipe.control_name)
        constants = stored.keys() - control.keys()
        listed = sum(len(ids) for ids in one.recipe.substitution.values())
        repeated = sum(len(group) - 1 for group in one.recipe.shared_constants)
        assert len(constants) == listed - repeated
        for name in stored.keys() - constants:
            assert torch.equal(stored[name], control[name])
        gone = control.keys() - stored.keys()
        dropped = {name.rpartition(".experts.")[2].split(".")[0] for name in gone}
        assert dropped == {str(e) for ids in one.recipe.substitution.values() for e in ids}


def weights(fixture_directory):
    """Every tensor of a fixture's checkpoint, from all of its files."""
    files = sorted((fixture_directory / "checkpoint").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("other", ["olmoe-explicit", "olmoe-sharded", "olmoe-sharded-no-index"])
def test_the_same_facts_in_another_form_or_in_shards_have_the_same_answers(fixtures, other):
    one, same = (fixture.read(fixtures / name) for name in ("olmoe-approx", other))
    assert fixture.differences(one, same)  # the recipe and the config at least
    shared = same.golden()
    assert len(shared) > 9
    for name, value in shared.items():
        assert fixture.number_differences(name, one.golden()[name], value) == []


def test_the_explicit_form_is_written_as_the_source_shows_it(fixtures):
    directory = fixtures / "olmoe-explicit" / "checkpoint"
    config = json.loads((directory / "config.json").read_text())
    block = config["compression_config"]["transform_config"]["expert_substitution"]
    target = block["targets"].pop("model.layers.1.mlp.experts")
    assert block["targets"].keys() == {"model.layers.0.mlp.experts"}
    assert {**block, "targets": {}} == {
        "version": 1,
        "router_semantics": {
            "preserve_logical_expert_ids": True,
            "preserve_router_weights": True,
            "renormalize_after_substitution": False,
        },
        "targets": {},
    }
    assert target.pop("replacements")["2"] == {
        "format": "constant-v1",
        "tensors": {"value": "model.layers.1.mlp.expert_replacements.2.value"},
    }
    assert target == {"num_logical_experts": 8, "weight_layout": "compact_retained_experts"}
    assert "approximate_experts" not in config


def test_a_shared_constant_is_stored_once_and_has_the_value_of_its_first_place(fixtures):
    shared = weights(fixtures / "olmoe-explicit-shared")
    apart = weights(fixtures / "olmoe-approx")
    assert {name for name in shared if name.startswith("novices")} == {
        "novices.0.1", "novices.0.5", "novices.1.0",
    }  # fmt: skip
    place = "model.layers.{}.mlp.experts.{}.approx_value"
    assert torch.equal(shared["novices.0.1"], apart[place.format(0, 1)])
    assert torch.equal(shared["novices.1.0"], apart[place.format(1, 0)])


def test_projections_of_one_expert_lie_in_several_shards(fixtures):
    directory = fixtures / "olmoe-sharded" / "checkpoint"
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    stored = {file.name: load_file(file).keys() for file in directory.glob("*.safetensors")}
    assert {name: f for f, names in stored.items() for name in names} == index["weight_map"]
    expert = "model.layers.0.mlp.experts.3."
    files = {file for name, file in index["weight_map"].items() if name.startswith(expert)}
    assert len(files) == len(stored) == 3
    unindexed = fixtures / "olmoe-sharded-no-index" / "checkpoint"
    assert {file.name for file in unindexed.glob("*.safetensors")} == stored.keys()
    assert not (unindexed / "model.safetensors.index.json").exists()


def test_pins_hold_for_every_file_and_notice_every_change(fixtures, tmp_path):
    assert pins.differences(fixtures) == []
    shutil.copytree(fixtures / "olmoe-top20", tmp_path / "olmoe-top20")
    assert pins.differences(tmp_path) == ["SHA256SUMS is missing"]
    pins.write(tmp_path)
    assert pins.differences(tmp_path) == []
    config = tmp_path / "olmoe-top20" / "checkpoint" / "config.json"
    config.write_text(config.read_text() + " ")
    (tmp_path / "olmoe-top20" / "golden.safetensors").unlink()
    (tmp_path / "extra").write_text("")
    assert pins.differences(tmp_path) == [
        "extra: not pinned",
        "olmoe-top20/checkpoint/config.json: changed",
        "olmoe-top20/golden.safetensors: lost",
    ]


@pytest.mark.parametrize(
    ("tensor", "change", "words"),
    [
        ("prompt.0.ids", lambda t: t + 1, "another prompt"),
        ("prompt.1.logprobs", lambda t: t * (1 + 1e-11), "off by"),
        ("prompt.0.bfloat16.token", lambda t: t * 2.5, "budget"),
        ("prompt.1.float32.max", lambda t: t / 2.5, "budget"),
        ("prompt.0.logprobs", lambda t: t.float(), "float32"),
    ],
)
def test_a_changed_number_is_noticed(tiny, tmp_path, tensor, change, words):
    shutil.copytree(tiny[0].directory, tmp_path / "tiny")
    golden = load_file(tmp_path / "tiny" / "golden.safetensors")
    golden[tensor] = change(golden[tensor])
    save_file(golden, tmp_path / "tiny" / "golden.safetensors", metadata={"format": "pt"})
    found = fixture.differences(fixture.read(tmp_path / "tiny"), tiny[0])
    assert len(found) == 1
    assert tensor in found[0]
    assert words in found[0]


# -- the command, on a user's own recipe


def test_the_command_fills_checks_and_lists_a_users_recipe(tmp_path):
    run = CliRunner()
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(yaml.safe_dump(SMALL))
    out = str(tmp_path / "out")
    filled = run.invoke(application("fixtures"), ["fixtures", "fill", str(recipe), "--out", out])
    assert filled.exit_code == 0, filled.output
    listed = run.invoke(application("fixtures"), ["fixtures", "list", "--root", out, "--json"])
    assert '"tiny"' in listed.output
    assert '"tiny-plain"' in listed.output
    checked = run.invoke(
        application("fixtures"), ["fixtures", "check", "--root", out, "tiny", "tiny-plain"]
    )
    assert checked.exit_code == 0, checked.output
    unpinned = run.invoke(application("fixtures"), ["fixtures", "check", "--root", out])
    assert unpinned.exit_code == 1
    assert "SHA256SUMS is missing" in unpinned.output
    run.invoke(application("fixtures"), ["fixtures", "pin", "--root", out])
    pinned = run.invoke(application("fixtures"), ["fixtures", "check", "--root", out, "--json"])
    assert pinned.exit_code == 0, pinned.output
    assert json.loads(pinned.output) == {"SHA256SUMS": [], "tiny": [], "tiny-plain": []}

    config = tmp_path / "out" / "tiny" / "checkpoint" / "config.json"
    config.write_text(config.read_text().replace("32", "32 "))
    changed = run.invoke(application("fixtures"), ["fixtures", "check", "--root", out, "tiny"])
    assert changed.exit_code == 1
    assert "config.json: bytes differ" in changed.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["fill", "absent.yaml", "--out", "out"],
        ["check", "--root", "absent"],
        ["check", "no-such-fixture"],
        ["list", "--root", "absent"],
    ],
)
def test_the_command_answers_mistakes_in_one_line(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(application("fixtures"), ["fixtures", *arguments])
    assert done.exit_code == 1
    assert done.output.startswith("error: ")
    assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == []
