"""The performance study's pictures and page, on rows made by hand."""
import dataclasses
import re
import shutil
import subprocess

import numpy as np
import pytest

from fusion_lab.study import design, page, plots
from fusion_lab.study.summary import summarise
from tests.study.study_parts import WORDS, failed, row_of, study_of
from tests.support import PATIENCE

HOW = dict(command="./launch_performance_study.sh", created="2026-01-01T00:00:00")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The path of a page with every section, from constructed rows, and the pictures in it."""
    folder, switches = tmp_path_factory.mktemp("page"), ("qkv-fusion-msa", "flash-attention")
    settings = [WORDS.name(on) for on in design.combinations(switches)]
    long_name = WORDS.name(WORDS.everything - {"opm-fusion", "torch-compile"})
    study = study_of((1, 2), (32, 64, 128), (8, 16), switches=switches,
                     settings=(*settings, "fused", long_name))
    rows, noise = [], np.random.default_rng(0)
    for point in study.points():
        batch, length, depth = point.shape.sizes
        seconds = 1e-5 * batch * length ** 1.5 * depth ** 0.5
        seconds /= 1.3 ** len(WORDS.parse(point.setting)) * np.exp(0.01 * noise.standard_normal())
        rows.append(row_of(point, seconds))
    rows[3] |= dict(status="failed", reason="<script>alert(1)</script>")
    summary = summarise(study, rows)
    pictures = plots.draw(study, summary, str(folder))
    (folder / "report.html").write_text(page.page(study, summary, HOW, pictures))
    return folder / "report.html", pictures


PICTURES = ["speedup_heat_map", "scaling", "memory", "ablation"]
TABLES = ["points", "failures", "ablation-table", "exponents", "settings"]


@pytest.mark.slow
def test_the_page_stands_alone(report):
    path, pictures = report
    text = path.read_text()
    assert [picture.name for picture in pictures] == PICTURES
    for picture in pictures:
        assert f'<figure id="{picture.name}">' in text
        assert path.with_name(f"{picture.name}.png").read_bytes() == picture.png and len(picture.png) > 5000
    for name in TABLES:
        assert f'<table id="{name}">' in text
    assert "<script" not in text and "alert" in text and "&lt;CPU&gt;" in text
    assert text.count('src="') == text.count('src="data:image/png;base64,') == len(PICTURES)
    assert "@import" not in text and 'href="http' not in text


def gaining(pyplot, spread):
    """(image, texts) of the map of a setting that gains 1.1 times, by runs that differ by this factor."""
    study = study_of((1,), (32, 64), (8,), settings=("baseline", "fused"), num_runs=3)
    summary = summarise(study, [row_of(p, 1.1 ** -(p.setting == "fused") * spread ** p.run)
                                for p in study.points()])
    axis = plots.speedup_heat_map(pyplot, study, summary).axes[0]
    return axis.images[0], [text.get_text() for text in axis.texts]


def test_colours_mean_the_same_in_every_study_and_mark_what_noise_could_explain():
    """A gain of 1.10 that noise could explain has no colour, and one that is sure has a pale one."""
    pyplot = plots.require_matplotlib()
    for spread, shade, mark in ((1.2, None, "\n(±)"), (1.0001, np.log2(1.1), "")):
        image, texts = gaining(pyplot, spread)
        assert image.get_clim() == (-2, 2) and texts == [f"1.10×{mark}"] * 2
        cells = np.asarray(image.get_array()[0, :2], float)
        assert np.isnan(cells).all() if shade is None else cells == pytest.approx([shade, shade])
    pyplot.close("all")


def test_lines_have_their_exponents():
    """Time goes with S squared, of the baseline; the other setting has failed at one of two lengths."""
    pyplot = plots.require_matplotlib()
    study = study_of((1,), (32, 64), (8,), settings=("baseline", "fused"), num_runs=1)
    rows = [row_of(p, (p.shape.sizes[1] / 32) ** 2) for p in study.points()]
    summary = summarise(study, [row for row in rows if row["setting"] == "baseline" or row["seq_len"] == 32])
    axis = plots.step_time(pyplot, study, summary).axes[0]
    assert axis.get_legend_handles_labels()[1] == ["baseline, S^2.00", "fused"]
    pyplot.close("all")
    alone = dataclasses.replace(study, sizes=((1,), (32,), (8,)))
    assert plots.step_time(pyplot, alone, summarise(alone, rows)) is None
    assert plots.ablation(pyplot, study, summary) is None


def findings(factors, noise, num_runs=3):
    """What the page says first of a setting that gains these factors at S 32 and 64."""
    study = study_of((1,), (32, 64), (8,), num_runs=num_runs, settings=("baseline", "fused"))
    rows = [row_of(p, (1 / factors[p.shape.sizes[1]] if p.setting == "fused" else 1)
                   * np.exp(noise * (p.run - 2))) for p in study.points()]
    return page.findings(study, summarise(study, rows))


def test_headlines_carry_their_intervals():
    """One of two shapes gains 2x for sure, the other nothing; then nothing gains, then runs are single."""
    text = findings({32: 2.0, 64: 1.0}, 0.01)
    assert "fused at 1 of 2 shapes, beyond noise at 1; baseline at 1 of 2 shapes, beyond noise at no" in text
    assert re.search(r"1\.41× \[1\.3\d, .* 1 of 2 undecided; most at B 1 S 32 N 8: 2\.00× \[1\.9", text)
    text = findings({32: 1.01, 64: 1.0}, 0.2)
    assert "no difference from the baseline shown, 1.00× [" in text and "2 of 2 undecided)" in text
    assert "of single runs, which prove nothing" in findings({32: 2.0, 64: 1.0}, 0, 1)
    text = findings({32: 0.5, 64: 0.5}, 0.01)
    assert "<b>slower</b> than the baseline at B 1 S 32 N 8, B 1 S 64 N 8" in text


def test_page_of_nothing_but_failures():
    study = study_of((2,), (32,), (8,), settings=("baseline",), num_runs=1, switches=("flash-attention",))
    text = page.page(study, summarise(study, [failed("baseline", 1, "failed", "broken")]), HOW, [])
    assert "failed: broken" in text


# In a browser


def browse(directory, *flags):
    """Chromium, headless, with a profile in directory."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    common = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
              "--disable-background-networking", "--disable-component-update", "--disable-sync",
              f"--user-data-dir={directory / 'profile'}", "--hide-scrollbars", "--enable-logging=stderr"]
    return subprocess.run([*common, *flags], timeout=PATIENCE, capture_output=True, text=True, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1200, 420])
def test_page_in_a_browser(report, tmp_path, width):
    from matplotlib import image
    shot, url = tmp_path / "shot.png", report[0].as_uri()
    done = browse(tmp_path, f"--window-size={width},3000", f"--screenshot={shot}", url)
    assert "CONSOLE" not in done.stderr, done.stderr
    pixels = image.imread(shot)[..., :3]
    assert pixels.shape[:2] == (3000, max(width, 500)) or pixels.shape[:2] == (3000, width)
    coloured = (pixels.max(axis=2) - pixels.min(axis=2) > 0.2).any(axis=1)  # rows with the plots' colours
    assert coloured.mean() > 0.1 and (pixels.min(axis=2) < 0.5).any(axis=1).mean() > 0.25
    if width == 1200:
        dom = browse(tmp_path, "--dump-dom", url).stdout
        assert dom.count("<table") == len(TABLES) and dom.count("<img") == len(PICTURES)


@pytest.mark.parametrize("medium, width", [("screen", 1280), ("print", 688)])  # A4 less its margins: 182 mm
def test_tables_fit_the_page(report, tmp_path, medium, width):
    script = """<script>document.body.dataset.wide = [...document.querySelectorAll("table")].filter(
        table => table.scrollWidth > table.parentElement.clientWidth).map(table => table.id) + ";"</script>"""
    text = report[0].read_text().replace("</body>", script + "</body>")
    (tmp_path / "probe.html").write_text(text.replace(f"@media {medium}", "@media all"))
    url = (tmp_path / "probe.html").as_uri()
    dom = browse(tmp_path, f"--window-size={width},3000", "--dump-dom", url).stdout
    assert 'data-wide=";"' in dom, dom.split("data-wide=")[1][:200]
