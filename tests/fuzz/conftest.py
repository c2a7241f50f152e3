"""Print what became of the cases, one line a room."""

from tests.fuzz.judge import SEED, TALLIES


def pytest_terminal_summary(terminalreporter):
    if TALLIES:
        terminalreporter.section(f"fuzz, seed {SEED}")
        for tally in TALLIES:
            terminalreporter.write_line(str(tally))
        cases = sum(t.cases for t in TALLIES)
        terminalreporter.write_line(f"{cases} cases in {sum(t.seconds for t in TALLIES):.0f} s")
