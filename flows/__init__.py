"""Order of the stages and flows. No tensors here, and no torch in this process."""

from earl_core.system.import_path import prepare

# Prefect's processes come in here, in directories whose files may have our packages' names.
prepare()
