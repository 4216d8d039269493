//! caches: what a cache does that CPU time per request does not show: many clients of what is being fetched, a million
//! entries, several disks of which one is slow or hangs, how often it has what is asked for.

pub mod collapse;
pub mod disks;
mod eviction;
pub mod hits;
pub mod million;
#[path = "../../../tests/shared/zipf.rs"]
mod zipf;

use crate::options::Options;
use crate::servers::{Kind, Program};

/// nginx and Gale: the others are configured in another way.
fn programs(options: &Options) -> Result<Vec<Program>, String> {
    let programs: Vec<Program> = options.servers(Some(&["nginx", "gale"]))?;
    let programs: Vec<Program> =
        programs.into_iter().filter(|program| matches!(program.kind, Kind::Nginx | Kind::Gale)).collect();
    if programs.is_empty() { Err("only nginx and Gale have proxy_cache".to_owned()) } else { Ok(programs) }
}
