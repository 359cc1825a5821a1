"""docs/model.svg names every switch and every sub-layer that there is, and no other switch."""
import re
import xml.etree.ElementTree as tree

from tests.support import ROOT
from tiny_openfold_v2 import SUBLAYERS, FusionConfig

PAGE = ROOT / "docs" / "model.svg"


def test_the_diagram_is_of_this_model():
    texts = [text.text for text in tree.parse(PAGE).iter("{http://www.w3.org/2000/svg}text")]
    switches = {name.removeprefix("enable_").replace("_", "-") for name in FusionConfig.names()}
    named = {word for element in tree.parse(PAGE).iter("{http://www.w3.org/2000/svg}text")
             if element.get("class") == "w" for word in element.text.split(", ")}
    assert named == switches
    words = " ".join(texts)
    for layer in SUBLAYERS:
        assert layer in words or layer.split("_")[-1] in words, layer  # pairs share a box
    assert {int(number) for number in re.findall(r"\b(\d+)\b", " ".join(
        text for text in texts if "Alg." in text))} == {6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
