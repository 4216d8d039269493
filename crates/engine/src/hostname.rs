//! The name of the machine.

use std::sync::OnceLock;

/// The machine's name in lower case, as it was when it was first asked for: `$hostname`.
pub fn hostname() -> &'static [u8] {
    static HOSTNAME: OnceLock<Vec<u8>> = OnceLock::new();
    HOSTNAME.get_or_init(|| rustix::system::uname().nodename().to_bytes().to_ascii_lowercase())
}
