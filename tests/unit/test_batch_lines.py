"""The lines of a batch: what is accepted, their order, and what was answered before."""

import json
import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.batch import lines as lines_module
from kvroute.batch.lines import BOM, MAX_FAULTS, BadLinesError, open_lines
from kvroute.batch.order import Sorter
from kvroute.batch.results import Results, ResultsError

CHAT = "/v1/chat/completions"


def chat_line(custom_id: str, content: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | fields


def write(path: Path, lines: Sequence[object]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_lines_are_found_again_by_their_index(tmp_path: Path) -> None:
    texts = [f"text {number} \u00e9" * number for number in range(20)]
    path = write(tmp_path / "in", [chat_line(text, text) for text in map(str, texts[1:])])
    path.write_text("\n" + path.read_text().replace("\n", "\n \n"))
    lines = open_lines(path)
    with closing(lines):
        found = [
            json.loads(bytes(lines.read(index).body))["messages"][0]["content"]
            for index in range(18, -1, -1)
        ]
    assert found == texts[:0:-1]


def test_lines_of_other_programs_are_read(tmp_path: Path) -> None:
    """Byte order marks, also of joined files, numbers as ids, `post`, and recordings."""
    audio = {"file_url": "data:audio/wav;base64,AAAA", "model": "whisper"}
    each = [
        chat_line("1", "x") | {"custom_id": 1},
        chat_line("2", "x", method="post") | {"custom_id": 2.5},
        chat_line("3", "x", url="/v1/audio/transcriptions", body=audio),
    ]
    path = tmp_path / "in"
    path.write_bytes(b"".join(BOM + json.dumps(line).encode() + b"\n\r\n" for line in each) + BOM)
    sorter = Sorter()
    with closing(open_lines(path, sorter.add)) as lines:
        assert [lines.read(index).custom_id for index in range(3)] == [1, 2.5, "3"]
        assert json.loads(bytes(lines.read(0).body)) == each[0]["body"]
        results = Results(tmp_path / "out", tmp_path / "errors", lines)
        results.write(1, status=200, request_id="r", body=b"{}")
        results.write(2.5, status=400, request_id="r", body=b"{}")
        results.close()
        assert json.loads((tmp_path / "out").read_text())["custom_id"] == 1
        again = Results(tmp_path / "out", tmp_path / "errors", lines)
        assert [*again.is_done] == [True, True, False]
        again.close()
    assert len(sorter.order()) == 3


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_text(json.dumps(chat_line("1", "x")), encoding="utf-16")
    with pytest.raises(BadLinesError, match="line 1: the file is in UTF-16"):
        open_lines(path)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "line 2: not valid JSON"),
        (json.dumps([]), "line 2: Expected `object`, got `array`"),
        (json.dumps({"url": CHAT, "body": {}}), "missing required field `custom_id`"),
        (json.dumps(chat_line("", "x")), "length >= 1"),
        (json.dumps(chat_line("b", "x", url="/v1/files")), "Invalid enum value '/v1/files'"),
        (json.dumps(chat_line("b", "x", method="GET")), "method is 'GET'; expected POST"),
        (json.dumps(chat_line("b", "x") | {"custom_id": True}), "got `bool` - at `$.custom_id`"),
        (json.dumps(chat_line("b", "x") | {"custom_id": 1 << 70}), "$.custom_id"),
        (json.dumps(chat_line("b", "x", body=[])), r"Expected `object`, got `array` - at `$.body`"),
        (json.dumps(chat_line("a", "x")), "line 2: an earlier line has the same custom_id"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, fault: str) -> None:
    path = tmp_path / "in"
    path.write_text(f"{json.dumps(chat_line('a', 'x'))}\n{line}\n")
    with pytest.raises(BadLinesError) as refused:
        open_lines(path)
    (found,) = refused.value.faults
    assert fault in str(found)


def test_the_first_hundred_faults_are_named(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\xff\n" * 300)
    with pytest.raises(BadLinesError) as refused:
        open_lines(path)
    assert len(refused.value.faults) == MAX_FAULTS == 100
    path.write_bytes(b"")
    with pytest.raises(BadLinesError, match="no lines"):
        open_lines(path)


@given(
    st.lists(st.text(max_size=30), min_size=1, max_size=40, unique=True),
    st.integers(0, 2000),
)
def test_lines_that_begin_alike_are_neighbours(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], memory_bytes: int
) -> None:
    """Whether keys are sorted in memory or on disk, no document is left and taken up again."""
    prompts = [(document, f"{document}|{number}") for document in documents for number in range(3)]
    random.Random(1).shuffle(prompts)
    sorter = Sorter(memory_bytes)
    path = tmp_path_factory.mktemp("batch") / "in"
    write(path, [chat_line(str(i), text) for i, (_, text) in enumerate(prompts)])
    order = open_lines(path, sorter.add)
    indexes = [*sorter.order()]
    order.close()
    assert sorted(indexes) == [*range(len(prompts))]
    texts = [prompts[index][1] for index in indexes]
    keys = [json.dumps(text, ensure_ascii=False) for text in texts]
    for document in documents:
        begin = json.dumps(f"{document}|", ensure_ascii=False)[:-1]
        places = [place for place, key in enumerate(keys) if key.startswith(begin)]
        assert places == [*range(places[0], places[-1] + 1)]


def test_the_order_does_not_depend_on_the_memory(tmp_path: Path) -> None:
    rng = random.Random(2)
    lines = [chat_line(str(number), str(rng.random())) for number in range(500)]
    path = write(tmp_path / "in", lines)
    orders = []
    for memory_bytes in (1, 5_000, 1 << 30):
        sorter = Sorter(memory_bytes)
        open_lines(path, sorter.add).close()
        orders.append([*sorter.order()])
    assert orders[0] == orders[1] == orders[2]


def test_a_run_goes_on_where_the_one_before_was_killed(tmp_path: Path) -> None:
    lines = open_lines(write(tmp_path / "in", [chat_line(str(i), "x") for i in range(4)]))
    output, errors = tmp_path / "out", tmp_path / "errors"
    results = Results(output, errors, lines)
    results.write("2", status=200, request_id="r", body=b'{"choices": []}')
    results.write("0", status=400, request_id="r", body=b'{"error": {}}')
    with pytest.raises(ResultsError, match="another process"):
        Results(output, errors, lines)
    results.close()
    with output.open("a") as file:
        file.write('{"id": "batch_req_1", "custom_id": "1", "resp')  # it was killed while it wrote
    again = Results(output, errors, lines)
    assert again.is_done.tolist() == [True, False, True, False]
    assert again.failed == 1
    again.write("1", status=503, request_id="r", body=b"away")
    again.close()
    lines.close()
    (answer,) = map(json.loads, output.read_text().splitlines())
    assert answer["custom_id"] == "2"
    assert answer["response"] == {"status_code": 200, "request_id": "r", "body": {"choices": []}}
    refused, away = map(json.loads, errors.read_text().splitlines())
    assert (refused["response"]["status_code"], refused["error"]) == (400, None)
    assert (away["response"]["status_code"], away["response"]["body"]) == (503, "away")


def test_files_of_another_batch_are_not_touched(tmp_path: Path) -> None:
    lines = open_lines(write(tmp_path / "in", [chat_line("a", "x")]))
    output = tmp_path / "out"
    other, same = (f'{{"custom_id": "{each}", "response": null}}\n' for each in "ba")
    for content in (other, same * 2, "notes\n", f"{json.dumps(chat_line('a', 'x'))}\n"):
        output.write_text(content)
        with pytest.raises(ResultsError, match="name another output file"):
            Results(output, tmp_path / "errors", lines)
        assert output.read_text() == content
    lines.close()


def test_a_line_needs_few_bytes_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "in"
    with path.open("w") as file:
        for number in range(2_000):
            file.write(json.dumps(chat_line(str(number), "x" * 500)) + "\n")
    lines = open_lines(path)
    lines.close()
    assert isinstance(lines.ids, np.ndarray)
    assert lines.ids.itemsize + lines.starts.itemsize == 16


def test_a_line_that_is_too_long_is_named_and_not_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "in", [chat_line("a", "x"), chat_line("b", "x" * 5000)])
    with pytest.raises(BadLinesError, match="line 2: the line has more than 1000 bytes") as refused:
        open_lines(path, max_line_bytes=1000)
    assert [fault.code for fault in refused.value.faults] == ["line_too_long"]
    open_lines(path, max_line_bytes=10_000).close()


def test_a_file_of_empty_lines_is_refused_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line of the file may be followed by an empty one."""
    monkeypatch.setattr(lines_module, "MAX_EMPTY", 10)
    path = write(tmp_path / "in", [chat_line(str(number), "x") for number in range(20)])
    path.write_text(path.read_text().replace("\n", "\n\n"))
    open_lines(path).close()
    path.write_text(path.read_text() + 12 * "\n")
    with pytest.raises(BadLinesError, match="line 51: the file has 31 empty lines"):
        open_lines(path)
