//! Name of the machine.

use std::sync::OnceLock;

/// The machine's name in lower case, read at the first call: `$hostname`.
pub fn hostname() -> &'static [u8] {
    static HOSTNAME: OnceLock<Vec<u8>> = OnceLock::new();
    HOSTNAME.get_or_init(|| rustix::system::uname().nodename().to_bytes().to_ascii_lowercase())
}
