"""Files that anybody may have written: read, or refused by OSError and ValueError alone."""
import os

import pytest

from fusion_lab.training import reading


def nested(levels):
    return "[" * levels + "]" * levels


@pytest.mark.parametrize("text, nan, expected", [
    ("[1, NaN, -Infinity]", True, [1, None, None]), (b'{"a": [1.5, "\\u00e9"]}', False, {"a": [1.5, "é"]}),
    (nested(2), False, [[]]), ('"\\udc80"', False, "\udc80")])
def test_json_that_is_read(text, nan, expected):
    assert reading.parse_json(text, nan) == expected
    assert reading.parse_json(nested(50)) and reading.parse_json('{"a": ' * 50 + "1" + "}" * 50)


@pytest.mark.parametrize("text, words", [
    ("NaN", "NaN is no number"), ("[-Infinity]", "-Infinity is no number"), ("{", "Expecting property"),
    (nested(51), "nested too deeply"), ('{"a": ' * 51 + "1" + "}" * 51, "nested too deeply"),
    (nested(10 ** 5), "nested too deeply"), ('"\\ud800"', "surrogates not allowed"),
    (b"\xff", "can't decode byte")])
def test_json_that_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        reading.parse_json(text)


def test_files_that_are_read_and_refused(tmp_path):
    path, fifo = tmp_path / "x.json", tmp_path / "fifo"
    reading.require_regular(path)  # nothing is there
    for content, nan, expected in (('{"a": NaN}', True, {"a": None}), ('{"a": 1}', False, {"a": 1})):
        path.write_text(content)
        assert reading.read_json(path, nan) == expected and reading.read_regular(path) == content.encode()
    path.write_text("[]")
    with pytest.raises(ValueError, match="^must be an object$"):
        reading.read_json(path)
    os.mkfifo(fifo)
    for place, number, words in ((tmp_path, 21, "is a directory"), (fifo, 22, "not a regular file")):
        with pytest.raises(OSError) as caught:
            reading.open_regular(place)
        found = caught.value
        assert (found.errno, found.strerror, found.filename) == (number, words, str(place))
    with pytest.raises(FileNotFoundError):
        reading.read_regular(tmp_path / "absent")
