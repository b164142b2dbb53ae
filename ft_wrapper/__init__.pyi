from . import abort as abort
from . import attribution as attribution
from . import completion as completion
from . import exception as exception
from . import finalize as finalize
from . import health_check as health_check
from . import initialize as initialize
from . import nested_restarter as nested_restarter
from . import rank_assignment as rank_assignment
from . import state as state
from . import store as store
from . import terminate as terminate
from .compose import Compose as Compose
from .live import LiveState as LiveState
from .monitor.slow import SlowRank as SlowRank
from .restart.report import RestartReport as RestartReport
from .restart.settings import Limits as Limits
from .state import FrozenState as FrozenState
from .state import Mode as Mode
from .state import State as State
from .torch_groups.leaks import Leak as Leak
from .torch_groups.leaks import find_leaks as find_leaks
from .wrapper import CallWrapper as CallWrapper
from .wrapper import Wrapper as Wrapper

__version__: str
