"""Tests the table that scripts/publish.py prints from recipes/<corpus>/RESULTS.md."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from asr_am.data.ownership import SIGNED

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("publish", ROOT / "scripts/publish.py")
assert spec is not None and spec.loader is not None
publish = importlib.util.module_from_spec(spec)
spec.loader.exec_module(publish)

RESULTS = """# Results: toy

## Word error rate on the test set

### all (1,510 words)

| system | kn2 | kn3 |
|:--|--:|--:|
| sat | **10.86** | – |
| net | **9.08** (9.00, 9.16) | **8.29** |

### swb (780 words)

| system | kn2 | kn3 |
|:--|--:|--:|
| sat | **3.08** | – |
| net | **3.46** (3.40, 3.52) | **2.05** |

## Every run
"""


def test_table_has_a_row_per_system_and_lm(tmp_path: Path) -> None:
    for corpus, text in (
        ("empty", ""),
        ("toy", RESULTS),
        ("small", RESULTS.replace("toy", "small").split("### swb")[0]),
    ):
        (tmp_path / corpus).mkdir()
        (tmp_path / corpus / "RESULTS.md").write_text(text)
    assert publish.table(tmp_path).splitlines() == [
        "| corpus | system | LM | all | swb |",
        "|:--|:--|:--|--:|--:|",
        "| small | sat | kn2 | 10.86 | – |",
        "| small | net | kn2 | 9.08 | – |",
        "| small | net | kn3 | 8.29 | – |",
        "| toy | sat | kn2 | 10.86 | 3.08 |",
        "| toy | net | kn2 | 9.08 | 3.46 |",
        "| toy | net | kn3 | 8.29 | 2.05 |",
    ]


def test_published_results_have_error_rates() -> None:
    for results in ROOT.glob("recipes/*/RESULTS.md"):
        assert publish.error_rates(results.read_text()), results


def test_results_are_copied_above_the_runs_that_were_added_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    for heading in ("## Further runs", "## Further runs  "):
        path.write_text(f"# Results: toy\n\nof yesterday\n\n{heading}\n\nby hand\n")
        publish.update_results(path, f"{SIGNED}\n{RESULTS}")
        assert path.read_text() == f"{RESULTS.strip()}\n\n{heading}\n\nby hand\n"


def test_tables_of_papers_replace_those_with_the_same_title(tmp_path: Path) -> None:
    path = tmp_path / "TABLES.md"
    publish.update_tables(path, ["### B, Table 2\n\n| b |\n", "### A, Table 1\n\n| old |\n"])
    publish.update_tables(path, ["### A, Table 1\n\n| new |\n"])
    text = path.read_text()
    assert text.startswith("# Tables of papers\n") and text.endswith(
        "### A, Table 1\n\n| new |\n\n### B, Table 2\n\n| b |\n"
    )


def test_rows_without_news_are_left_out_of_tables(tmp_path: Path) -> None:
    head = "| cell | measure | published | ours | ours / published | remark |\n|:--|--:|--:|--:|--:|--:|\n"
    table = f"### A\n\n    command\n\n{head}| a | hours | 2 | 2.1 | 1.05 |  |\n| a | speed | 8 | 8 | 1 | restates |\n"
    figure = "| b | hours | – | 7 | – |  |\n"
    assert publish.shorten(f"{table}{figure}\nNote.\n") == table.replace(
        "| a | speed | 8 | 8 | 1 | restates |\n", "\nNote."
    )
    assert publish.shorten(f"### B\n\n    command\n\n{head}{figure}\nNote.\n") == "### B\n\n    command\n\nNote."


def test_results_are_copied_without_plots_above_what_is_written_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    (tmp_path / "exp/toy/tables/t").mkdir(parents=True)
    (tmp_path / "recipes/toy").mkdir(parents=True)
    (tmp_path / "exp/toy/tables/t/table.md").write_text("### A table\n")
    path = tmp_path / "recipes/toy/RESULTS.md"
    path.write_text("# Results\n\nold\n\n## Further runs\n\nBy hand.\n")
    text = "# Results\n\n    recipes/toy/run.sh a=1 exp=/home/me/exp b=2\n\n![plot](report/a.png)\n\n| kn2 |\n"
    (tmp_path / "exp/toy/RESULTS.md").write_text(text)
    for _ in range(2):
        publish.publish("toy")
        expected = "# Results\n\n    recipes/toy/run.sh a=1 b=2\n\n| kn2 |\n\n## Further runs\n\nBy hand.\n"
        assert path.read_text() == expected
    assert (tmp_path / "recipes/toy/TABLES.md").read_text().endswith("### A table\n")


def test_only_data_of_recipes_kaldi_has_its_results_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    for folder in ("exp/mine", "exp/try/toy", "recipes/kaldi"):
        (tmp_path / folder).mkdir(parents=True)
    for corpus, command in (("try/toy", "recipes/toy/run.sh"), ("mine", "recipes/toy/run.sh"), ("absent", "")):
        if command:
            (tmp_path / f"exp/{corpus}/RESULTS.md").write_text(f"# Results\n\n    {command} seed=1\n")
        with pytest.raises(SystemExit):
            publish.publish(corpus)
    (tmp_path / "exp/kaldi").mkdir()
    (tmp_path / "exp/kaldi/RESULTS.md").write_text("hello")
    with pytest.raises(SystemExit, match="is no report"):
        publish.publish("kaldi")
    assert not any((tmp_path / "recipes/kaldi").iterdir())
    words = "--name mine 'a b=1' 'exp='\"'\"'/tmp/h x'\"'\"''"
    (tmp_path / "exp/mine/RESULTS.md").write_text(f"# Results\n\n    recipes/kaldi/run.sh {words}\n")
    publish.publish("mine")
    expected = "# Results\n\n    recipes/kaldi/run.sh --name mine 'a b=1'\n"
    assert (tmp_path / "recipes/kaldi/RESULTS.md").read_text() == expected


def test_nothing_is_replaced_by_what_goes_to_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    (tmp_path / "recipes/kaldi").mkdir(parents=True)
    for corpus in ("mine", "yours"):
        (tmp_path / "exp" / corpus).mkdir(parents=True)
        (tmp_path / "exp" / corpus / "RESULTS.md").write_text("# Results\n\n    recipes/kaldi/run.sh\n")
    with pytest.raises(SystemExit, match=r"mine and yours: the results of both go to .*recipes/kaldi"):
        publish.publish_all(["mine", "yours"])
    for tree in ("mine", "slow/mine"):
        (tmp_path / "exp" / tree / "tables/t").mkdir(parents=True)
        (tmp_path / "exp" / tree / "tables/t/table.md").write_text("### A table\n")
    with pytest.raises(SystemExit, match=r"exp/mine/tables/t/table.md and .*exp/slow/mine/tables/t/table.md: have the"):
        publish.publish_all(["mine"])
    assert not any((tmp_path / "recipes/kaldi").iterdir())
