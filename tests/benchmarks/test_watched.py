from stages.watched import WatchedDevice


def test_lanes_note_what_they_did_in_order() -> None:
    device = WatchedDevice("cpu")
    lane = device.side_stream()
    with lane.work():
        pass
    device.begin()
    with lane.work(after=device.mark()):
        pass
    with lane.work():
        pass
    pieces = device.pieces()
    assert [piece.kind for piece in pieces] == ["codec", "decode"]
    assert pieces[0].start_s <= pieces[0].end_s <= pieces[1].start_s <= pieces[1].end_s
