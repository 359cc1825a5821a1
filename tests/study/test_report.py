"""The performance study's statistics, pictures and page, on rows made by hand."""
import dataclasses
import shutil
import subprocess

import numpy as np
import pytest

from fusion_lab.study import design, directory, plots, report
from fusion_lab.study import statistics as stats
from fusion_lab.study.results import Row
from fusion_lab.study.summary import PointSummary, Recommendation, Recommended, summarise
from tests.study.study_parts import WORDS, row_of, study_of, summary_of
from tests.support import PATIENCE

# Statistics, against values from tables and by hand

@pytest.mark.parametrize("df, t", [(1, 12.7062), (2, 4.3027), (5, 2.5706), (30, 2.0423)])
def test_t_quantile(df, t):
    assert stats.t_quantile(df) == pytest.approx(t, abs=2e-4)


def test_ratio_interval():
    """Welch, three runs each, variances 0.01 and 0.04 of one run: df = 5^2 / (1/2 + 16/2) = 50/17."""
    above, below = np.exp([-0.1, 0, 0.1]), np.exp([-0.2, 0, 0.2])
    ratio, low, high = stats.ratio_interval(2 * above, below)
    half = stats.t_quantile(50 / 17) * np.sqrt(0.05 * np.pi / 2 / 3)
    assert ratio == pytest.approx(2) and np.log([low / 2, high / 2]) == pytest.approx([-half, half])
    # one side without any spread leaves the other's single degree of freedom
    _, low, high = stats.ratio_interval(np.exp([-0.1, 0.1]), [1.0, 1.0])
    assert np.log(high / low) / 2 == pytest.approx(12.7062 * 0.1, rel=1e-3)
    assert stats.ratio_interval([2.0, 2.0], [1.0, 1.0]) == pytest.approx((2, 2, 2))
    assert stats.ratio_interval([2.0], [1.0, 1.0]) == (pytest.approx(2), None, None)
    # geometric mean over two shapes: each of the four groups counts with a quarter of its variance
    pairs = [(2 * above, below), (8 * above, above)]
    mean, low, high = stats.mean_ratio_interval(pairs)
    shares = np.array([1, 4, 1, 1]) * 0.01
    half = stats.t_quantile(shares.sum() ** 2 / (shares ** 2 / 2).sum()) * np.sqrt(shares.sum() * np.pi / 24)
    assert mean == pytest.approx(4) and np.log([low / 4, high / 4]) == pytest.approx([-half, half])


@pytest.mark.parametrize("quiet", [0.05, 0.001])
def test_intervals_cover_under_unequal_noise(quiet):
    """About 95 times of 100, where one of four settings is noisier; pooled variances made it 47 and 51."""
    generator, ratios, effects = np.random.default_rng(0), 0, 0
    deviations, runs = [0.05, quiet, quiet, quiet], [3, 8, 8, 8]
    for _ in range(300):
        times = [np.exp(d * generator.standard_normal(n)) for d, n in zip(deviations, runs, strict=True)]
        _, low, high = stats.ratio_interval(times[0], times[1])
        ratios += low <= 1 <= high
        levels = [[0, 0], [0, 1], [1, 0], [1, 1]]
        _, low, high = stats.factor_effects(["a", "b"], levels, times)["main"]["a"]
        effects += low <= 1 <= high
    assert 0.93 <= ratios / 300 <= 0.99 and 0.93 <= effects / 300 <= 0.99


def test_fit_exponent():
    assert stats.fit_exponent([1, 2, 4, 8], [5, 20, 80, 320]) == pytest.approx((2, 0), abs=1e-9)
    exponent, error = stats.fit_exponent([1, np.e, np.e ** 2], [1, np.e ** 2, np.e ** 2])
    assert exponent == pytest.approx(1) and error == pytest.approx((2 / 3) ** 0.5 / 2 ** 0.5)
    assert stats.fit_exponent([1, 2], [1, 8]) == (pytest.approx(3), None)


def test_effects_of_constructed_data():
    """a makes steps 2x faster, b 1.25x, c nothing; a and b together another 1.2x; runs differ by +-1%."""
    names = ["a", "b", "c"]
    levels = [[a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)]
    times = [100 / (2 ** a * 1.25 ** b * 1.2 ** (a * b)) for a, b, _ in levels]
    effects = stats.factor_effects(names, levels, [[t * 1.01, t / 1.01] for t in times])
    main = {name: effect[0] for name, effect in effects["main"].items()}
    assert main == pytest.approx(dict(a=2 * 1.2 ** 0.5, b=1.25 * 1.2 ** 0.5, c=1))
    together = {pair: effect[0] for pair, effect in effects["interaction"].items()}
    assert together == pytest.approx({("a", "b"): 1.2, ("a", "c"): 1, ("b", "c"): 1})
    _, low, high = effects["interaction"]["a", "b"]
    # one run: sd sqrt(2) log 1.01, 8 degrees of freedom; a contrast of 8 means of 2 runs, times 4
    half = 2.306 * 2 ** 0.5 * np.log(1.01) * 4 / 8 * (8 / 2) ** 0.5
    assert np.log(high / low) / 2 == pytest.approx(half, rel=1e-3)
    assert stats.factor_effects(names, levels[:6], [[t] for t in times[:6]]) is None
    # noise in one point alone: one degree of freedom, its weight in the contrast 1/8
    one_noisy = [[t * np.exp(0.1 * (i == 0)), t] for i, t in enumerate(times)]
    noisy = stats.factor_effects(names, levels, one_noisy)
    _, low, high = noisy["main"]["c"]
    assert np.log(high / low) / 2 == pytest.approx(12.7062 * 2 / 8 * 0.1 / 2, rel=1e-3)
    single = stats.factor_effects(names, levels[:7], [[t] for t in times[:7]])  # and one point has failed
    assert single["interaction"]["a", "b"] == (pytest.approx(1.2), None, None)


# The page

@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A study with every section, made from constructed rows."""
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
    rows[3] = dataclasses.replace(rows[3], status="failed", reason="<script>alert(1)</script>")
    first = min(study.shapes())
    summary = dataclasses.replace(summarise(study, rows), recommendation=Recommendation(None, (
        Recommended(first, (), "fused", "python x", 1.0, 1.0, 1.5, 1.4, 1.6),)))
    config = directory.Config(study, "./launch_performance_study.sh", "2026-01-01T00:00:00")
    directory.write_results(str(folder), summary, config, plots=True)
    return folder, summary


PICTURES = ["speedup_heat_map", "scaling", "memory", "depth", "ablation", "interactions", "pareto"]
TABLES = ["points", "failures", "ablation-table", "effects", "exponents", "settings", "recommended"]


@pytest.mark.slow
def test_page_is_self_contained(page):
    folder, _ = page
    text = (folder / "report.html").read_text()
    for name in PICTURES:
        assert f'<figure id="{name}">' in text and (folder / f"{name}.png").stat().st_size > 5000
    for name in TABLES:
        assert f'<table id="{name}">' in text
    assert "<script" not in text and "alert" in text and "&lt;CPU&gt;" in text
    assert 'src="' not in text and "@import" not in text and 'href="http' not in text
    assert len(text) < 2 ** 20
    ids = [part.split('"')[0] for part in text.split(' id="')[1:]]
    assert len(ids) == len(set(ids))


def constructed_study(seconds, num_runs):
    """Summary of all combinations of three switches, at S 32 and 64; seconds(switches that are on, run)."""
    switches = ("qkv-fusion-msa", "flash-attention", "opm-fusion")
    study = study_of((1,), (32, 64), (8,), num_runs=num_runs, switches=switches,
                     settings=tuple(WORDS.name(on) for on in design.combinations(switches)))
    return summarise(study, [row_of(p, seconds(WORDS.parse(p.setting), p.run)) for p in study.points()])


def only(monkeypatch, *names, svgs=True):
    """Draw these pictures alone and, because that takes seconds, none of them as PNG."""
    monkeypatch.setattr(plots, "PLOTS", [plot for plot in plots.PLOTS if plot[0] in names])
    monkeypatch.setattr(plots, "write_atomically", lambda *_: None)
    if not svgs:
        monkeypatch.setattr(plots, "svg_of", lambda *_: "")


def test_pictures_keep_what_matters_and_name_what_they_leave_out(tmp_path, monkeypatch):
    """Baseline and the setting with everything on stay, slow as they are; of the rest the slowest goes."""
    only(monkeypatch, "scaling", "memory", "speedup_heat_map", "pareto")
    everything = "qkv-fusion-msa+flash-attention+opm-fusion"
    seconds = [2.0, 1.0, 0.5, 1.9]  # by the number of switches
    summary = constructed_study(lambda on, _: 1.5 if on == {"flash-attention"} else seconds[len(on)], 2)
    shown = plots.shown_settings(summary)
    assert set(summary.study.settings) - set(shown) == {"only-flash-attention"}
    figures = {figure.name: figure for figure in plots.draw(summary, str(tmp_path))}
    for name in ("scaling", "memory"):
        assert "1 setting is not shown; the table has all." in figures[name].caption
    assert "1 map is not shown" in figures["speedup_heat_map"].caption
    titles = "".join(figures["speedup_heat_map"].svgs)
    assert f"{everything}, N 8" in titles and "only-flash-attention, N 8" not in titles
    assert "Grey dots are the other settings" in figures["pareto"].caption
    only(monkeypatch, "scaling", "memory", "speedup_heat_map", "pareto", svgs=False)
    few = dataclasses.replace(
        summary, study=dataclasses.replace(summary.study, settings=("baseline", everything)),
        points=[p for p in summary.points if p.setting in ("baseline", everything)])
    captions = "".join(figure.caption for figure in plots.draw(few, str(tmp_path)))
    assert not any(word in captions for word in ("not shown", "Grey dots", "Dashed lines"))
    few.points[0] = dataclasses.replace(few.points[0], peak_memory_mb=1)  # the slower one is the smaller
    assert "Dashed lines" in plots.draw(few, str(tmp_path))[-1].caption
    few.points[0] = dataclasses.replace(few.points[0], peak_memory_mb=0.995 * few.points[1].peak_memory_mb)
    assert "Dashed lines" not in plots.draw(few, str(tmp_path))[-1].caption


def test_pictures_mark_what_noise_could_explain(tmp_path, monkeypatch):
    """flash-attention gains 2x, the other switches nothing; runs differ by 2%; single runs prove nothing."""
    only(monkeypatch, "interactions", "speedup_heat_map")
    for runs, cells in ((3, 5), (1, 6)):  # of 3 effects and 3 interactions
        summary = constructed_study(lambda on, run: 0.5 ** ("flash-attention" in on) * 1.02 ** run, runs)
        figures = {figure.name: "".join(figure.svgs) for figure in plots.draw(summary, str(tmp_path))}
        assert figures["interactions"].count("(±)") == cells
    assert figures["speedup_heat_map"].count("(±)") == plots.MAX_MAPS * 2
    assert figures["speedup_heat_map"].count(f"fill: {plots.UNDECIDED}") == plots.MAX_MAPS * 2


def test_colours_mean_the_same_in_every_study():
    """A gain of 1.11 that noise could explain has no colour, and one that is sure has a pale one."""
    pyplot = plots.require_matplotlib()
    for spread, shade in ((1.2, None), (1.0001, np.log2(1.1))):
        summary = constructed_study(lambda on, run, spread=spread: 1.1 ** -bool(on) * spread ** run, 3)
        figure, axis = pyplot.subplots()
        plots.speedup_heat_map(pyplot, summary)[0][0].draw(axis)
        image, = axis.images
        assert image.get_clim() == (-2, 2)
        cells = np.asarray(image.get_array()[0, :2], float)
        assert np.isnan(cells).all() if shade is None else cells == pytest.approx([shade, shade])
        pyplot.close(figure)


def test_front_leaves_noise_alone():
    """Of four settings, b is surely faster than a and larger; c is a within noise; d is beaten by b."""
    def point(times, memory):
        return PointSummary(shape=None, setting="x", n=len(times), run_medians_ms=times, speedup=None,
                            median_ms=float(np.median(times)), peak_memory_mb=memory, speedup_low=None,
                            speedup_high=None)
    a, b = point((2.0, 2.02, 1.98), 10.0), point((1.0, 1.01, 0.99), 20.0)
    c, d = point((1.9, 2.3, 1.5), 10.05), point((1.5, 1.51, 1.49), 20.0)
    assert plots.front([a, b, c, d]) == [b, c, a] and plots.front_lines([a, b]) == [(b, a)]
    assert plots.front_lines([a, c]) == [] and plots.front_lines([point((2.0,), 10), point((1.0,), 20)]) == []


def test_headlines_carry_their_intervals():
    """One of two shapes gains 2x for sure, the other nothing; then nothing gains, then runs are single."""
    def headline(factors, noise, num_runs=3):
        study = study_of((1,), (32, 64), (8,), num_runs=num_runs, settings=("baseline", "fused"))
        rows = [row_of(p, (1 / factors[p.shape["seq_len"]] if p.setting == "fused" else 1)
                       * np.exp(noise * (p.run - 2))) for p in study.points()]
        return report.findings(summarise(study, rows))
    text = headline({32: 2.0, 64: 1.0}, 0.01)
    assert "<b>Fastest:</b> fused at 1 of 2 shapes, beyond noise at 1; baseline at 1 of 2 shapes, beyond " \
           "noise at none." in text
    assert "1.41× [1.3" in text and "2 shapes, 1 of 2 undecided; most at B 1 S 32 N 8: 2.00× [1.9" in text
    assert "less memory" in text
    text = headline({32: 1.01, 64: 1.0}, 0.2)
    assert "no difference from the baseline shown, 1.00× [" in text and "2 of 2 undecided)" in text
    assert "the same memory" in headline({32: 1.0, 64: 1.0}, 0.01)
    assert "of single runs, which prove nothing" in headline({32: 2.0, 64: 1.0}, 0, 1)
    text = headline({32: 0.5, 64: 0.5}, 0.01)
    assert "<b>slower</b> than the baseline at B 1 S 32 N 8, B 1 S 64 N 8" in text and "more memory" in text


@pytest.mark.slow
def test_pictures_are_the_same_every_time(page, tmp_path, monkeypatch):
    folder, summary = page
    text, again = (folder / "report.html").read_text(), plots.draw(summary, str(tmp_path))
    assert [figure.name for figure in again] == PICTURES
    for figure in again:
        assert all(svg in text for svg in figure.svgs) and figure.svgs
        assert (tmp_path / f"{figure.name}.png").read_bytes() == (folder / f"{figure.name}.png").read_bytes()
    legend = [text for text in "".join(again[PICTURES.index("scaling")].svgs).split("<text") if "S^" in text]
    assert legend and all("±" in text for text in legend)
    monkeypatch.setattr(plots, "MAX_PANELS", 2)
    only(monkeypatch, "scaling", svgs=False)
    assert "2 panels are not shown" in plots.draw(summary, str(tmp_path))[0].caption


def test_exponents_of_the_page(page):
    folder, _ = page
    fits = {(e["axis"], e["figure"]): e for e in summary_of(folder)["scaling"] if e["setting"] == "baseline"}
    assert fits["seq_len", "median_ms"]["exponent"] == pytest.approx(1.5, abs=0.05)
    assert fits["num_seqs", "median_ms"]["exponent"] == pytest.approx(0.5, abs=0.1)


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
def test_page_in_a_browser(page, tmp_path, width):
    from matplotlib import image
    shot, url = tmp_path / "shot.png", (page[0] / "report.html").as_uri()
    done = browse(tmp_path, f"--window-size={width},3000", f"--screenshot={shot}", url)
    assert "CONSOLE" not in done.stderr, done.stderr
    pixels = image.imread(shot)[..., :3]
    assert pixels.shape[:2] == (3000, max(width, 500)) or pixels.shape[:2] == (3000, width)
    coloured = (pixels.max(axis=2) - pixels.min(axis=2) > 0.2).any(axis=1)  # rows with the plots' colours
    assert coloured.mean() > 0.1 and (pixels.min(axis=2) < 0.5).any(axis=1).mean() > 0.25
    if width == 1200:
        dom = browse(tmp_path, "--dump-dom", url).stdout
        assert dom.count("<table") == len(TABLES) and dom.count("<figure") == len(PICTURES)
        assert dom.count("<svg") > len(PICTURES)


@pytest.mark.parametrize("medium, width", [("screen", 1280), ("print", 688)])  # A4 less its margins: 182 mm
def test_tables_fit_the_page(page, tmp_path, medium, width):
    script = """<script>document.body.dataset.wide = [...document.querySelectorAll("table")].filter(
        table => table.scrollWidth > table.parentElement.clientWidth).map(table => table.id) + ";"</script>"""
    text = (page[0] / "report.html").read_text().replace("</body>", script + "</body>")
    (tmp_path / "probe.html").write_text(text.replace(f"@media {medium}", "@media all"))
    url = (tmp_path / "probe.html").as_uri()
    dom = browse(tmp_path, f"--window-size={width},3000", "--dump-dom", url).stdout
    assert 'data-wide=";"' in dom, dom.split("data-wide=")[1][:200]


def test_page_of_nothing_but_failures():
    study = study_of((1,), (32,), (8,), settings=("baseline",), num_runs=1, switches=("flash-attention",))
    row = Row(study.shapes()[0], "baseline", 1, "failed", "broken", None, None, 1.0)
    text = report.page(summarise(study, [row]), directory.Config(study, "x", "2026-01-01"), [])
    assert "failed: broken" in text
