"""What crosses a cut: coded, packed, carried, and which codecs from which step on."""
