"""The performance study's pictures and page, on rows made by hand."""
import numpy as np
import pytest

from fusion_lab.study import plots
from fusion_lab.study.page import page
from fusion_lab.study.summary import summarise
from tests.study.test_summary import lines_of, row, study_of

HOW = dict(command="./launch_performance_study.sh", created="2026-01-01T00:00:00")


def test_the_page_has_every_section_and_stands_alone():
    settings = ["baseline", "fused", *(f"{kind}-{switch}" for kind in ("only", "without") for switch in (
        "qkv-fusion-msa", "flash-attention", "opm-fusion")), "qkv-fusion-msa+opm-fusion", "ultra"]
    sizes = dict(batch_size=[1, 2], seq_len=[32, 64, 128], num_seqs=[8, 16])
    study = study_of(sizes=sizes, settings=settings)
    noise = np.random.default_rng(0)

    def rows_of(run, shape):
        if run == 1 and shape["seq_len"] == 128:
            return "<script>alert(1)</script>"
        seconds = 1e-5 * shape["batch_size"] * shape["seq_len"] ** 1.5 * shape["num_seqs"] ** 0.5
        gains = {name: 1.1 ** number * np.exp(0.01 * noise.standard_normal())
                 for number, name in enumerate(settings)}
        return [row(name, seconds / gains[name], gains[name], peak_memory_mb=1e3 * seconds + 20)
                for name in settings]
    summary = summarise(study, lines_of(study, rows_of))
    pictures = plots.draw(study, summary)
    text = page(study, summary, HOW, pictures)
    assert len(pictures) == 4 and all(png.startswith(b"\x89PNG") for _, _, png in pictures)
    assert '<table id="points">' in text and '<table id="ablation">' in text
    assert "<script" not in text and "alert" in text and "&lt;CPU&gt;" in text
    assert text.count('src="') == text.count('src="data:image/png;base64,') == 4
    assert "@import" not in text and "url(" not in text and 'href="http' not in text


def test_colours_mean_the_same_in_every_study_and_mark_what_noise_could_explain():
    """A gain of 1.10 that noise could explain has no colour, and one that is sure has a pale one."""
    pyplot = plots.require_matplotlib()
    study = study_of(sizes=dict(batch_size=[1], seq_len=[32, 64], num_seqs=[8]))
    for spread, shade, mark in ((1.2, np.nan, "\n(±)"), (1.0001, np.log2(1.1), "")):
        summary = summarise(study, lines_of(study, lambda run, _, spread=spread: [
            row("baseline", 1.0), row("fused", 1.0, 1.1 * spread ** (run - 2))]))
        axis = plots.heat_map(pyplot, study, summary).axes[0]
        assert axis.images[0].get_clim() == (-2, 2)
        assert [text.get_text() for text in axis.texts] == [f"1.10x{mark}"] * 2
        cells = np.asarray(axis.images[0].get_array().filled(np.nan)[0], float)
        assert cells == pytest.approx([shade] * 2, nan_ok=True)
    pyplot.close("all")


@pytest.mark.parametrize("axes", [dict(width="W"), dict(batch_size="B")])
def test_a_study_of_one_size_or_of_failures_has_a_page(axes):
    sizes = {axis: [2] for axis in axes}
    study = study_of(axes=axes, sizes=sizes)
    for rows in ([row("baseline", 0.5), row("fused", 0.25, 2.0)], "broken"):
        summary = summarise(study, lines_of(study, lambda *_, rows=rows: rows))
        assert len(plots.draw(study, summary)) == (rows != "broken")
        assert "broken" in page(study, summary, HOW, []) or rows != "broken"
