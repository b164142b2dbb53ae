"""Process groups of ``torch.distributed``, which last for one iteration."""

from .abort import abort_all as abort_all
from .abort import abort_may_hang as abort_may_hang
from .abort import being_aborted as being_aborted
from .meeting import connect as connect
from .meeting import point_to as point_to
from .meeting import variables_restored as variables_restored
from .release import release_process_groups as release_process_groups
from .release import taking_over_destroy as taking_over_destroy
from .release import wait_for_released_groups as wait_for_released_groups
