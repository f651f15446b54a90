"""Files are replaced whole, whoever else replaces them at the same time."""

from ppo.files import new_file, replace_text


def test_two_writers_of_the_same_file_do_not_take_each_others(tmp_path):
    path = tmp_path / "found.json"
    replace_text(path, "before")
    with new_file(path) as first, new_file(path) as second:
        first.write_text("first")
        second.write_text("second")
        assert path.read_text() == "before"
    assert path.read_text() == "first"  # whose block has ended last
    assert list(tmp_path.iterdir()) == [path]
