//! caches: properties of caches beyond CPU time per request: many clients of an object being fetched, a million
//! entries, several disks of which one is slow or hangs, and hit rates.

pub mod collapse;
pub mod disks;
mod eviction;
pub mod hits;
pub mod million;
#[path = "../../../tests/shared/zipf.rs"]
mod zipf;

use crate::options::Options;
use crate::servers::{Kind, Program};

/// Returns nginx and Gale; the other servers are configured differently.
fn programs(options: &Options) -> Result<Vec<Program>, String> {
    let programs: Vec<Program> = options.servers(Some(&["nginx", "gale"]))?;
    let programs: Vec<Program> =
        programs.into_iter().filter(|program| matches!(program.kind, Kind::Nginx | Kind::Gale)).collect();
    if programs.is_empty() { Err("only nginx and Gale have proxy_cache".to_owned()) } else { Ok(programs) }
}
