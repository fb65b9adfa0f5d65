"""Texts of every room: names of leaves, tables, and errors for wrong arguments.

Every other room imports this room, which imports none.
"""

from fddp.wording.texts import check_choice as check_choice
from fddp.wording.texts import check_has as check_has
from fddp.wording.texts import check_number as check_number
from fddp.wording.texts import check_range as check_range
from fddp.wording.texts import check_seconds as check_seconds
from fddp.wording.texts import check_switch as check_switch
from fddp.wording.texts import check_whole as check_whole
from fddp.wording.texts import leaf_name as leaf_name
from fddp.wording.texts import leaf_names as leaf_names
from fddp.wording.texts import preformatted as preformatted
from fddp.wording.texts import printable as printable
from fddp.wording.texts import table as table
