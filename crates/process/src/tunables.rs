//! Settings for the C library of a worker process that depend on the processor.
//!
//! glibc copies two kilobytes and more with `rep movsb` if the processor reports that it is fast at that. AMD
//! processors since Zen 3 report so, but are twenty times slower than with plain loads and stores if the destination
//! lies a few bytes behind the source in its page, as a TLS record does behind its five bytes of head. glibc handles
//! this since version 2.40 (<https://sourceware.org/bugzilla/show_bug.cgi?id=30994>); older ones need this setting. The
//! figures are in docs/decisions/0048-copies-on-amd.md.

use std::fs;

/// <https://sourceware.org/glibc/manual/latest/html_node/Hardware-Capability-Tunables.html>
const VARIABLE: &str = "GLIBC_TUNABLES";
/// A threshold that is never reached.
const VALUE: &str = "glibc.cpu.x86_rep_movsb_threshold=0x40000000000";

/// Family of the first of these processors, Zen 3.
const FAMILY_MIN: u32 = 25;

/// Returns a variable for a worker's environment, on processors that need it.
pub(super) fn variable() -> Option<(&'static str, &'static str)> {
    if cfg!(not(all(target_arch = "x86_64", target_env = "gnu"))) {
        return None;
    }
    let processors = fs::read_to_string("/proc/cpuinfo").ok()?;
    is_slow_at_rep_movsb(&processors).then_some((VARIABLE, VALUE))
}

/// Parses the text of /proc/cpuinfo; the first processor stands for all.
fn is_slow_at_rep_movsb(processors: &str) -> bool {
    let field = |name: &str| {
        let lines = processors.lines().filter_map(|line| line.split_once(':'));
        lines.map(|(own, value)| (own.trim(), value.trim())).find(|(own, _)| *own == name).map(|(_, value)| value)
    };
    let family = field("cpu family").and_then(|family| family.parse::<u32>().ok());
    field("vendor_id") == Some("AuthenticAMD") && family.is_some_and(|family| family >= FAMILY_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_processors_of_amd_from_zen_3_on_are_meant() {
        let of = |vendor: &str, family: &str| {
            is_slow_at_rep_movsb(&format!(
                "processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 1\n"
            ))
        };
        assert!(of("AuthenticAMD", "25") && of("AuthenticAMD", "26"));
        assert!(!of("AuthenticAMD", "23") && !of("GenuineIntel", "25") && !of("AuthenticAMD", "many"));
        assert!(!is_slow_at_rep_movsb("") && !is_slow_at_rep_movsb("processor\t: 0\nBogoMIPS\t: 50.00\n"));
    }
}
