"""The cryptography of secure aggregation: keys, shares, masks, and the ring in which masked vectors are summed.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017; Bell et al., "Secure
Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020 (eprint 2020/704). Independent of federations;
primitives are those of ``cryptography`` and PyCryptodome (the extra ``fedspan[secagg]``), which only this package and
``fedspan.transports.http`` import.
"""

import importlib.util

from fedspan.errors import FedspanError, build_install_command


def require_packages() -> None:
    """Check that the libraries are installed."""
    for package, name in (("cryptography", "cryptography"), ("Crypto", "pycryptodome")):
        if importlib.util.find_spec(package) is None:
            raise FedspanError(
                name, None, problem=f"federation.secure needs this package. Run: {build_install_command('secagg')}"
            )
