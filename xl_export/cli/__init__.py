"""The commands of `xl-export`: one file each."""

from xl_export.shadow import refuse_shadowed

refuse_shadowed()  # before any command imports a package that may be shadowed
