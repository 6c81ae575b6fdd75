"""Private names of torch and transformers are looked up when the room is imported."""

import pytest

from isthmus.errors import UserError
from isthmus.model import PRIVATE_NAMES, check_private_names


def test_the_installed_versions_have_all_names() -> None:
    check_private_names()
    assert {name.partition(":")[0].partition(".")[0] for name in PRIVATE_NAMES} == {"torch", "transformers"}


@pytest.mark.parametrize("name", ["torch:_no_such_operator", "transformers.no_such_module:anything"])
def test_a_version_without_a_name_is_refused_with_one_that_has_it(name: str) -> None:
    with pytest.raises(UserError, match=name.replace(":", ".")) as refused:
        check_private_names((name,))
    assert "install" in (refused.value.hint or "")
