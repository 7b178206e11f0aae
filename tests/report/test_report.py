"""What a report says of runs, and what it says of folders that are none."""

import base64
import json
import re
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedveil.core.ledger import Row
from fedveil.report import write
from report.audits import audited

Maker, Rower = Callable[..., Path], Callable[..., Row]


def words(path: Path) -> str:
    """The text of a page with plain spaces, without style sheets and tags."""
    text = re.sub(r"<style>.*?</style>|<svg.*?</svg>", " ", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", text)).split())


def verdict(path: Path) -> str:
    found = re.search(r'<p class="verdict">(.*?)</p>', path.read_text(encoding="utf-8"))
    assert found
    return unescape(found[1]).replace("\N{NO-BREAK SPACE}", " ")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "new" / "folder" / "report.html"


def test_one_run_says_what_it_reached_and_sent(make: Maker, row: Rower, out: Path) -> None:
    rows = [row(1, 0.5), row(2, None, epsilon=1.25, missing={"1": "dropped"}), row(3, 0.9375)]
    assert write([make("a", rows)], out) == out
    assert verdict(out) == (
        "fedavg reached a test accuracy of 93.75% in 3 rounds. A client sent 1 kB a round; in all, clients sent 6 kB "
        "and received 12 kB. 1 answer failed. The accountant charged ε = 1.25."
    )
    assert "fedavg 3 93.75% 71.88% 0.0625 6 kB 12 kB 1 kB 1 1.25 1.5 s" in words(out)


def test_the_cheaper_of_two_equally_good_runs_is_named(make: Maker, out: Path) -> None:
    dear = make("a", [0.7, 0.93, 0.95], method="fedavg", sent=100_000)
    cheap = make("b", [0.5, 0.8, 0.94, 0.945], method="tofu", sent=1000)
    worse = make("c", [0.8, 0.93], method="tiny", sent=1)
    assert verdict(write([dear, cheap, worse], out)) == (
        "fedavg has the best test accuracy, 95.00% after 3 rounds. Of the 2 runs that end within one point of it, tofu "
        "got that far with the fewest bytes sent by clients: 6 kB. fedavg needed 600 kB, 100 times as many."
    )


def test_the_best_run_may_also_be_the_cheapest(make: Maker, out: Path) -> None:
    folders = [make("a", [0.95], method="fedavg"), make("b", [0.945], method="tofu", sent=5000)]
    assert "Of the 2 runs that end within one point of it, it also got that far with the fewest bytes" in verdict(
        write(folders, out)
    )


def test_a_run_that_is_best_by_far_stands_alone(make: Maker, out: Path) -> None:
    folders = [make("a", [0.5, 0.95], method="fedavg"), make("b", [0.7], method="tofu", sent=1)]
    assert "No other run ends within one point of it; its clients sent 4 kB to come that close." in verdict(
        write(folders, out)
    )


def test_a_run_that_came_close_but_fell_back_does_not_count(make: Maker, out: Path) -> None:
    folders = [make("a", [0.5, 0.95], method="fedavg"), make("b", [0.95, 0.1], method="diverged", sent=1)]
    assert "No other run ends within one point" in verdict(write(folders, out))


def test_runs_of_different_tasks_come_with_a_warning(make: Maker, out: Path) -> None:
    folders = [make("a", [0.5], method="a"), make("b", [0.5], method="b", task='data = "mnist"')]
    assert verdict(write(folders, out)).endswith("The runs differ in task or split, so compare them with care.")
    assert "with care" not in verdict(write(folders[:1], out))


def test_an_unfinished_run_says_how_far_it_is(make: Maker, out: Path) -> None:
    write([make("a", [0.5, 0.6], planned=20)], out)
    assert verdict(out).endswith("fedavg is unfinished: 2 of 20 rounds are done.")
    assert "fedavg 2 of 20 60.00%" in words(out)


def test_a_run_that_stopped_at_its_target_is_finished(make: Maker, out: Path) -> None:
    assert "unfinished" not in verdict(write([make("a", [0.5, 0.6], planned=20, extra="target = 0.6")], out))


def test_a_run_that_may_have_stopped_at_its_privacy_budget_is_not_called_unfinished(make: Maker, out: Path) -> None:
    folder = make("a", [0.5, 0.6], planned=20, tables="[method.privacy]\nbudget = 3.0\n")
    assert verdict(write([folder], out)).endswith(
        "fedavg + DP has done 2 of 20 rounds within its privacy budget of ε = 3."
    )


def test_a_run_that_has_only_begun_is_reported(make: Maker, out: Path) -> None:
    folder = make("a", [], planned=5)
    for name in ("ledger.jsonl", "environment.json"):
        (folder / name).unlink()
    write([folder, make("b", [0.5], method="tofu")], out)
    assert "fedavg has no measured accuracy yet. fedavg is unfinished: 0 of 5 rounds are done." in verdict(out)
    assert "No round is done yet." in words(out)
    assert "The environment was not recorded." in words(out)


def test_a_row_cut_off_by_a_kill_is_left_out(make: Maker, out: Path) -> None:
    folder = make("a", [0.5, 0.75])
    with open(folder / "ledger.jsonl", "ab") as file:
        file.write(b'{"round":3,"coh')
    assert "75.00% in 2 rounds" in verdict(write([folder], out))


def test_runs_of_one_method_are_told_apart_by_folder(make: Maker, out: Path) -> None:
    folders = [make("first", [0.5]), make("second", [0.5]), make("x/third", [0.5]), make("y/third", [0.5])]
    text = words(write([*folders, folders[0], make("other", [0.4], method="tofu")], out))
    assert "5 runs compared" in text
    assert "fedavg (first) 1 50.00%" in text
    assert "fedavg (second) 1 50.00%" in text
    assert "fedavg (x/third) 1" in text
    assert "fedavg (y/third) 1" in text
    assert str(folders[2].parent) not in text
    assert "tofu 1 40.00%" in text


def test_details_hold_recipe_environment_and_rounds_with_reasons(make: Maker, row: Rower, out: Path) -> None:
    rows = [row(1, 0.5, missing={"0": "dropped", "1": "dropped"}, events=["below quorum: 0 of 2"]), row(2, 0.6)]
    text = words(write([make("a", rows)], out))
    assert '[method] name = "fedavg"' in text
    assert "fedveil 0.1.0 · torch 2.13.0" in text
    assert "1 50.00% 2 kB 4 kB 2 × dropped below quorum: 0 of 2 2 60.00%" in text


def test_no_path_of_this_machine_is_shown(make: Maker, out: Path) -> None:
    folder = make("a", [0.5])
    command = "fedveil run digits/fedavg --out '/home/ann b/runs/x' --data-dir=/srv/data/ --set split.kind=iid ~/m.toml"
    known = {"command": command, "data_dir": "/srv/data", "threads": 2, "gpu": None, "note": "/opt/secret/thing"}
    (folder / "environment.json").write_text(json.dumps(known))
    text = words(write([folder], out))
    assert "command fedveil run digits/fedavg --out x --data-dir=data/ --set split.kind=iid m.toml · threads 2" in text
    assert not re.search("/home|ann b|/srv|/opt|~|data_dir", text)
    (folder / "environment.json").write_text(json.dumps({"command": "fedveil report it's /home/ann/x"}))
    assert "command fedveil report it's x" in words(write([folder], out))


def test_fixed_private_randomness_is_flagged_at_the_top(make: Maker, out: Path) -> None:
    folders = [make("a", [0.5], method="safe"), make("b", [0.5], method="unsafe")]
    assert "Insecure" not in words(write(folders, out))
    (folders[1] / "environment.json").write_text('{"insecure_test_noise": true}')
    said = words(write(folders, out))
    assert "Insecure test noise: the private randomness of unsafe was fixed, so noise protects nobody there." in said
    assert said.index("Insecure") < said.index("best test accuracy")


def test_fidelity_is_shown_where_it_was_measured(make: Maker, row: Rower, out: Path) -> None:
    plain = make("a", [0.5], method="plain")
    assert "Fidelity" not in words(write([plain], out))
    rows = [row(n, 0.5) for n in (1, 2, 3)]
    for each, up, layer in zip(rows, (0.25, 0.5, 0.75), (0.1, 0.2, 0.6), strict=True):
        each.metrics |= {"cosine": up, "cosine/conv<1>": layer, "cosine/out": 1.0}
    coded = make("b", rows, method="coded")
    text = words(write([plain, coded], out))
    assert "Fidelity Cosine of the update that a client means" in text
    assert "the server means" not in text
    assert "layer cosine in the first round mean in the last round conv<1> 0.100 0.300 0.600 out 1.000 1.000" in text
    rows[0].metrics["cosine_down"] = 0.5
    assert "the step that the server means" in words(write([make("c", rows, method="coded")], out))


def test_what_privacy_was_spent_is_said_with_its_kind_and_drawn(make: Maker, row: Rower, out: Path) -> None:
    plain = make("a", [0.5], method="plain")
    assert "Privacy" not in words(write([plain], out))
    rows = [row(1, 0.5, epsilon=1.5), row(2, None), row(3, 0.6, epsilon=2.25)]
    record = make("b", rows, method="fedlap", tables="[method.privacy]\ndelta = 1e-3\n")
    user = make("c", rows[:1], tables="[method.user_privacy]\n")
    said = words(write([plain, record, user], out))
    assert "after 3 rounds the accountant had charged ε = 2.25 at δ = 0.001 for each record (proved)." in said
    assert "fedavg + DP: after 1 round the accountant had charged ε = 1.5 for each user (proved)." in said
    assert "plain: after" not in said
    assert "The largest ε that any client has charged. Test accuracy against that ε" in said
    assert "round accuracy ε bytes up bytes down missing events 1 50.00% 1.5 2 kB 4 kB 2 – 1.5 2 kB" in said
    assert "round accuracy bytes up bytes down missing events 1 50.00% 2 kB" in said
    (record / "environment.json").write_text('{"insecure_test_noise": true}')
    said = words(write([record], out))
    assert "for each record (which proves nothing, because its noise was fixed)." in said
    assert "proved" not in said


def test_an_epsilon_is_said_with_its_relation_and_colluders(make: Maker, row: Rower, out: Path) -> None:
    rows = [row(1, 0.5, epsilon=1.5, relation="zero-out", colluders=2)]
    said = words(write([make("a", rows, tables="[method.user_privacy]\n")], out))
    assert "The accountant charged ε = 1.5 for neighbours by zero-out." in said
    told = "charged ε = 1.5 for each user, for neighbours by zero-out (proved); it holds if at most 2 clients of a sum"
    assert f"{told} told the server their noise." in said
    assert "ε relation time" in said


def test_an_audit_says_what_was_found_beside_its_control(make: Maker, out: Path) -> None:
    folder = audited(make("a", [0.5]), None)
    (folder / "figures").mkdir()
    for name in ("audit.svg", "other.svg"):
        (folder / "figures" / name).write_text("<svg/>")
    said = words(write([folder, make("b", [0.5], method="plain")], out))
    assert (
        "run attack AUC with 95% found at 0.1% false ones found at 1% false ones balanced accuracy "
        "fedavg loss 0.516 0.474 to 0.558 (0.000) 0.013 0.492 fedavg baseline 0.516 0.474 to 0.558 (0.000) 0.013 0.492 "
        "fedavg control 0.966 0.925 to 1.000 (0.000) 0.013 0.938"
    ) in said
    assert "fedavg: how many members are found at how many false ones." in said
    assert "ε ruled out" not in said
    assert [given["alt"] for tag, given in tags(out) if tag == "img"] == ["other"]
    assert "Audit" not in words(write([make("c", [0.5])], out))


def test_what_an_audit_rules_out_stands_beside_what_was_charged(make: Maker, out: Path) -> None:
    said = words(write([audited(make("a", [0.5]), control=6.5)], out))
    assert "fedavg the last weights 0.5 5.75 0.001 6 not contradicted" in said
    assert "fedavg 400 canaries in private gradients 1.12 4.75 1e-06 6.5 not contradicted" in said
    assert "contradicts what" not in said
    assert "by the trade-off curve" not in said  # the file is of an older version
    said = words(write([audited(make("d", [0.5]), control=6.5, curve=2.5, curve_control=9.0)], out))
    assert "fedavg 400 canaries in private gradients, by the trade-off curve 2.5 4.75 1e-06 9 not contradicted" in said
    assert "In fedavg members are compared with test records, which may differ from training records" in said
    assert "4.5 too weak to tell" in words(write([audited(make("b", [0.5]), control=4.5)], out))
    broken = ("canaries rule out every ε below 5",)
    said = words(write([audited(make("c", [0.5]), broken=broken, lower=5.0)], out))
    assert "The audit of fedavg contradicts what it promises." in verdict(out)
    assert "fedavg: canaries rule out every ε below 5. Measured" in said
    assert "5 4.75 1e-06 6.5 contradicted" in said


def test_surrogates_are_followed_round_by_round(make: Maker, row: Rower, out: Path) -> None:
    rows = [row(1, 0.5), row(2, 0.6)]
    for each in rows:
        each.metrics |= {"matching": 3.0, "moved": 1.5, "server_steps": 65.0}
    said = words(write([make("a", rows), make("b", [0.5], method="plain")], out))
    assert "Surrogates How far synthetic sets are from the records they stand for" in said
    assert "How far the server's weights moved in a round. How many steps the server took in a round." in said
    assert "trust region" not in said
    assert "Surrogates" not in words(write([make("c", [0.5])], out))


def test_pictures_of_rounds_are_rows_of_one_figure(make: Maker, out: Path) -> None:
    folder = make("a", [0.5])
    strips = folder / "figures" / "proxy <images>"
    strips.mkdir(parents=True)
    for name in ("real.png", "00010.png", "00002.png", "notes.txt"):
        (strips / name).write_bytes(b"\x89PNG")
    (folder / "figures" / "empty").mkdir()
    said = words(write([folder, make("b", [0.5], method="plain")], out))
    assert "from the test set. round 2 round 10 real proxy <images> of fedavg Details" in said
    assert "empty" not in said
    assert [given["alt"] for tag, given in tags(out) if tag == "img"] == [
        f"proxy <images>, {name}" for name in ("round 2", "round 10", "real")
    ]


def test_long_ledgers_are_condensed_and_keep_their_sums(make: Maker, row: Rower, out: Path) -> None:
    rows = [row(n, 0.5, missing={"0": f"refused: reason {n % 7}"}) for n in range(1, 501)]
    text = words(write([make("a", rows)], out))
    assert "1–10 50.00% 20 kB 40 kB 2 × refused: reason 1;" in text
    assert "3 more" in text
    assert "491–500" in text


class Tags(HTMLParser):
    """The tags of a page and their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def tags(path: Path) -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(path.read_text(encoding="utf-8"))
    return parser.tags


EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>'\\\"><svg onload=alert(1)>"


def test_nothing_from_a_file_becomes_markup(make: Maker, row: Rower, out: Path) -> None:
    raw = EVIL.replace('\\"', '"')
    rows = [row(1, 0.5, missing={raw: raw}, events=[raw])]
    folders = [make("<i>a", rows, method=EVIL, extra=f'seed = "{EVIL}"'), make("<i>b", rows, method=EVIL)]
    for folder in folders:
        (folder / "environment.json").write_text(f'{{"{EVIL}": "{EVIL}"}}')
        (folder / "figures").mkdir()
        (folder / "figures" / "<script>'\">.svg").write_text("<svg onload='alert(1)'><script>alert(1)</script></svg>")
        (folder / "split.svg").write_text("</div><script>alert(1)</script>")
        audited(folder, broken=(raw,), control=1)
        told = json.loads((folder / "audit.json").read_text())
        told["attacks"] = {raw: told["attacks"]["loss"]}
        (folder / "audit.json").write_text(json.dumps(told))
    for chosen in (folders, folders[:1]):
        found = tags(write(chosen, out))
        assert not [tag for tag, _ in found if tag in ("script", "i", "link", "iframe", "object")]
        assert not [name for _, attributes in found for name in attributes if name.startswith("on")]
        assert all((given["src"] or "").startswith("data:image/") for tag, given in found if tag == "img")
        assert "alert(1)" in words(out)


def test_names_of_odd_characters_are_shown_without_harm(make: Maker, out: Path) -> None:
    text = words(write([make("a", [0.5], method=r"a\u0000\u202Eb$^$\n"), make("_b", [0.4], method="_联邦")], out))
    assert "a??b$^$? 1 50.00%" in text
    assert "_联邦 1 40.00%" in text


def test_the_same_split_is_shown_once(make: Maker, out: Path) -> None:
    folders = [make(name, [0.5], method=name) for name in ("a", "b", "c")]
    for folder in folders:
        (folder / "split.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    assert words(write(folders, out)).count("What each client holds.") == 1
    (folders[2] / "split.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"><g/></svg>')
    assert "What each client of a, b holds. What each client of c holds." in words(write(folders, out))


def test_figures_of_a_method_appear_with_their_names(make: Maker, out: Path) -> None:
    folder = make("a", [0.5])
    (folder / "figures").mkdir()
    (folder / "figures" / "cosine per layer.svg").write_bytes(b"<svg/>")
    (folder / "figures" / "synthetic images.png").write_bytes(b"\x89PNG")
    (folder / "figures" / "notes.txt").write_bytes(b"not shown")
    images = {given["alt"]: given["src"] for tag, given in tags(write([folder], out)) if tag == "img"}
    assert images == {
        "cosine per layer": "data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode(),
        "synthetic images": "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode(),
    }
    assert "cosine per layer synthetic images Rounds" in words(out)


def test_the_same_folders_give_the_same_page(make: Maker, out: Path) -> None:
    folders = [make("a", [0.5, 0.6]), make("b", [0.5], method="tofu")]
    assert write(folders, out).read_bytes() == write(folders, out.with_name("again.html")).read_bytes()


def test_no_number_has_more_than_six_digits(make: Maker, row: Rower, out: Path) -> None:
    rows = [row(n, 1 / 3, 123_456_789, epsilon=2 / 3, seconds=1 / 7) for n in range(1, 4)]
    text = words(write([make("a", rows)], out))
    assert not [number for number in re.findall(r"\d[\d.,]*", text) if len(re.sub(r"\D", "", number)) > 6]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("recipe.toml", None, r"a holds no recipe\.toml; give a folder that a run was written to"),
        ("recipe.toml", b"rounds = ", r"recipe\.toml is damaged \(.*\); restore it or leave this run out"),
        ("recipe.toml", b"\xff", r"recipe\.toml is damaged"),
        ("recipe.toml", b"a = " + b"[" * 10_000, r"recipe\.toml is damaged"),
        ("recipe.toml", b"rounds = 3", r'recipe\.toml names no method; put name = "\.\.\." under its \[method\]'),
        ("recipe.toml", b"[method]\nname = 3", r"recipe\.toml names no method"),
        ("recipe.toml", b"method = 3", r"recipe\.toml names no method"),
        ("environment.json", b"[]", r"environment\.json is damaged \(.*\); restore it or leave this run out"),
        ("ledger.jsonl", b'{"round":1}\n', r"ledger\.jsonl is damaged \(.* line 1 .*\); restore it or leave"),
        ("ledger.jsonl", b"\xff\n", r"ledger\.jsonl is damaged"),
        ("attack.json", b'{"round": 1}', r"attack\.json is damaged \(.*\); restore it or leave this run out"),
        ("audit.json", b'{"round": 1}', r"audit\.json is damaged \(.*\); restore it or leave this run out"),
        ("audit.json", b"[" * 10_000, r"audit\.json is damaged"),
    ],
)
def test_a_damaged_folder_is_one_sentence(
    make: Maker, out: Path, name: str, content: bytes | None, message: str
) -> None:
    folder = make("a", [0.5])
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        write([folder], out)
    assert not out.exists()


def test_an_audit_whose_curve_is_no_curve_is_one_sentence(make: Maker, out: Path) -> None:
    folder = audited(make("a", [0.5]))
    told = json.loads((folder / "audit.json").read_text())
    for tpr, message in (([0.0], "more rates of one kind"), ([0, 2, 1], "no share"), ([0, -1, 1], "no share")):
        told["attacks"]["loss"]["tpr"] = tpr
        (folder / "audit.json").write_text(json.dumps(told))
        with pytest.raises(ValueError, match=rf"audit\.json is damaged \(a curve has .*{message}.*\); restore it"):
            write([folder], out)


def test_figures_that_no_axis_holds_are_left_out(make: Maker, row: Rower, out: Path) -> None:
    rows = [row(n, 0.5, epsilon=spent) for n, spent in enumerate((1e-320, 2.0, 1e308), 1)]
    for each, value in zip(rows, (-1e308, 1e-320, 1e308), strict=True):
        each.metrics |= {"matching": value, "radius": value, "cosine": value, "moved": 1e-320, "radius_least": value}
        each.metrics |= {"radius_most": -value}
    text = write([make("a", rows)], out).read_text()
    assert text.count("<svg") == 8


def test_no_folder_is_one_sentence(tmp_path: Path, out: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere holds no recipe\.toml; give a folder"):
        write([tmp_path / "nowhere"], out)
    with pytest.raises(ValueError, match="no run was given to report on; name at least one run folder"):
        write([], out)
