from xml.etree import ElementTree

from specdec_kernels.training.curve import append_entry, draw_curve, read_entries


def test_a_curve_is_read_as_it_was_written_and_drawn(tmp_path):
    path = tmp_path / "training_curve.jsonl"
    for step in (50, 100):
        append_entry(path, {"step": step, "loss": 1 / 3 + step, "head_losses": [step / 7, 1.0, 2.0], "lr": 1e-3})
    append_entry(path, {"step": 100, "held_out_top1": [0.5, 0.25]})
    with open(path, "a") as file:
        file.write('{"step": 150, "lo')
    entries = list(read_entries(path))
    assert [entry["step"] for entry in entries] == [50, 100, 100]
    assert entries[0]["loss"] == 50.3333
    picture = draw_curve(path, ["soft"])
    assert picture == tmp_path / "training_curve.svg"
    titles = [t.text for t in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["loss", "soft", "head 2", "head 3", "held out top1 1", "held out top1 2"]
