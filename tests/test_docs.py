"""The examples of README.md and docs/ run, and what these pages say of the project is so."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ntxent_jax

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
COMMANDS = [
    "python -m pip install -e '.[examples]' && python examples/simclr_digits.py",
    "python -m pip install -e '.[test]' && python -m pytest",
    "python examples/multi_device.py",
]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def examples_of(text: str) -> list[doctest.Example]:
    """Doctest examples in the python blocks of a markdown page, with their line numbers in the page."""
    examples = []
    for block in FENCE.finditer(text):
        if block["language"] == "python":
            above = text.count("\n", 0, block.start("code"))
            for example in doctest.DocTestParser().get_examples(block["code"]):
                example.lineno += above
                examples.append(example)
    return examples


def failures_of(text: str, name: str) -> str:
    """Report of the examples of a page that fail; empty if all pass. The blocks of a page share their names."""
    report: list[str] = []
    test = doctest.DocTest(examples_of(text), {"__name__": "__main__"}, name, name, 0, text)
    doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    return "".join(report)


def report_of(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    if "jax_num_cpu_devices" not in text:
        return failures_of(text, str(page.relative_to(ROOT)))
    # The page simulates devices, which must be said before JAX starts: in a process of its own.
    command = [sys.executable, __file__, str(page)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    return done.stdout + (done.stderr if done.returncode else "")


@each_page
def test_examples_run(page: Path) -> None:
    report = report_of(page)
    if report:
        pytest.fail(report, pytrace=False)


@each_page
def test_every_python_block_is_an_example_that_runs(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("```") == 2 * len(list(FENCE.finditer(text))), "a fence is not closed"
    blocks = [block["code"] for block in FENCE.finditer(text) if block["language"] in {"python", "pycon", "py"}]
    assert [code for code in blocks if not code.lstrip().startswith(">>>")] == []
    assert "doctest: +SKIP" not in text


def test_a_wrong_example_is_seen() -> None:
    page = "text\n\n```python\n>>> x = 1\n```\n\nmore\n\n```python\n>>> x + 1\n{}\n```\n"
    assert failures_of(page.format(2), "right") == ""
    assert "line 10" in failures_of(page.format(3), "wrong")


@pytest.mark.parametrize("command", COMMANDS)
def test_readme_has_the_commands_that_ci_runs(command: str) -> None:
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")
    assert command in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_links_between_files_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http", "mailto:")):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_public_name_is_in_the_reference() -> None:
    reference = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs/api").glob("*.md")))
    documented = re.findall(r"^\.\. auto\w+:: (\w+)$", reference, re.MULTILINE)
    assert sorted(documented) == sorted(ntxent_jax.__all__)


def test_every_page_is_reached_from_the_index() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in PAGES[1:]]
    assert [page for page in pages if page != "index" and not re.search(rf"^{page}$", index, re.MULTILINE)] == []


def test_changelog_begins_with_unreleased() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)[0] == "Unreleased"


if __name__ == "__main__":
    sys.stdout.write(failures_of(Path(sys.argv[1]).read_text(encoding="utf-8"), sys.argv[1]))
