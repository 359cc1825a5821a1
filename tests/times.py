"""Where the time went, by folder: beside what pytest's --durations says of single tests."""
from collections import Counter


def pytest_terminal_summary(terminalreporter):
    seconds = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                seconds[report.nodeid.partition("::")[0].rpartition("/")[0]] += report.duration
    if terminalreporter.config.getoption("durations"):
        terminalreporter.section("seconds by folder")
        for folder, took in seconds.most_common():
            terminalreporter.line(f"{took:8.1f} {folder}")
