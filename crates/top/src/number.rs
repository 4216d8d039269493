//! Formatting of numbers: short, with similar widths for values of similar size.

use super::figures::Bound;

/// Shown for an unknown value.
pub const NONE: &str = "-";

/// Formats a count: in full up to 99,999.
pub fn count(value: u64) -> String {
    if value < 100_000 { value.to_string() } else { scaled(value as f64, 1000.0, &["", "k", "M", "G", "T", "P", "E"]) }
}

/// Formats a number per second.
pub fn rate(value: Option<f64>) -> String {
    match value {
        None => NONE.to_owned(),
        Some(value) if value > 0.0 && value < 10.0 => format!("{value:.1}"),
        Some(value) => count(value.round() as u64),
    }
}

/// Formats a number of bytes.
pub fn bytes(value: f64) -> String {
    scaled(value, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"])
}

/// Formats a part of a whole as a percentage.
pub fn percent(part: u64, whole: u64) -> String {
    if whole == 0 { NONE.to_owned() } else { format!("{:.0} %", 100.0 * part as f64 / whole as f64) }
}

/// Formats a bound of a histogram.
pub fn bound(bound: Option<Bound>) -> String {
    match bound {
        None => NONE.to_owned(),
        Some(Bound(u64::MAX)) => ">16 s".to_owned(),
        Some(Bound(millis)) => micros(millis * 1000),
    }
}

/// Formats a time given in microseconds.
pub fn micros(value: u64) -> String {
    match value {
        0..1_000 => format!("{value} us"),
        1_000..1_000_000 => format!("{} ms", three(value as f64 / 1e3)),
        _ => format!("{} s", three(value as f64 / 1e6)),
    }
}

fn scaled(mut value: f64, step: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while value >= step && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    let space = if step == 1024.0 { " " } else { "" };
    format!("{}{space}{}", if unit == 0 { format!("{value:.0}") } else { three(value) }, units[unit])
}

/// Formats a number with one decimal if it is below 10, else with none.
fn three(value: f64) -> String {
    if value < 10.0 && value.fract() >= 0.05 { format!("{value:.1}") } else { format!("{value:.0}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!([count(0), count(99_999), count(1_234_567), count(u64::MAX)], ["0", "99999", "1.2M", "18E"]);
        assert_eq!([rate(None), rate(Some(0.0)), rate(Some(0.25)), rate(Some(1234.5))], ["-", "0", "0.2", "1235"]);
        assert_eq!([bytes(0.0), bytes(1536.0), bytes(3e9)], ["0 B", "1.5 KiB", "2.8 GiB"]);
        assert_eq!([percent(1, 0), percent(1, 3)], ["-", "33 %"]);
        assert_eq!([micros(5), micros(1_000), micros(12_500), micros(2_500_000)], ["5 us", "1 ms", "12 ms", "2.5 s"]);
        assert_eq!([bound(None), bound(Some(Bound(u64::MAX))), bound(Some(Bound(16)))], ["-", ">16 s", "16 ms"]);
    }
}
