//! Local time in the formats of logs.
//!
//! The C library applies the time zone; its result is cached for the second, so a busy log asks once.

use std::cell::Cell;
use std::ffi::CString;
use std::fmt;

/// A second in the local time zone, in parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalTime {
    year: i32,
    month: u8,
    day: u8,
    hour: u8,
    minute: u8,
    second: u8,
    /// Minutes east of Greenwich.
    offset_minutes: i32,
}

const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

thread_local! {
    static LAST: Cell<Option<(u64, LocalTime)>> = const { Cell::new(None) };
}

/// Local time of a second since 1970.
pub fn local_time(seconds: u64) -> LocalTime {
    if let Some((last, time)) = LAST.get()
        && last == seconds
    {
        return time;
    }
    let time = ask_library(seconds);
    LAST.set(Some((seconds, time)));
    time
}

fn ask_library(seconds: u64) -> LocalTime {
    let seconds = libc::time_t::try_from(seconds).unwrap_or(libc::time_t::MAX);
    // SAFETY: all bytes zero is a valid `tm` (integers and a pointer that is not
    // followed), and both pointers are to live values of the right type.
    let parts = unsafe {
        let mut parts: libc::tm = std::mem::zeroed();
        libc::localtime_r(&raw const seconds, &raw mut parts);
        parts
    };
    let small = |value: i32| u8::try_from(value).unwrap_or(0);
    LocalTime {
        year: parts.tm_year + 1900,
        month: small(parts.tm_mon),
        day: small(parts.tm_mday),
        hour: small(parts.tm_hour),
        minute: small(parts.tm_min),
        second: small(parts.tm_sec),
        offset_minutes: i32::try_from(parts.tm_gmtoff / 60).unwrap_or(0),
    }
}

/// Time zone of a formatted time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zone {
    /// Local time zone.
    Local,
    /// GMT.
    Gmt,
}

/// Formats a time with the C library's `strftime`, in English; `None` if the result is empty or longer than nginx's
/// limit.
pub fn format_time(format: &[u8], seconds: u64, zone: Zone) -> Option<Vec<u8>> {
    const TEXT_MAX: usize = 2048;
    let format = CString::new(format).ok()?;
    let seconds = libc::time_t::try_from(seconds).ok()?;
    let mut text = vec![0_u8; TEXT_MAX];
    // SAFETY: all bytes zero is a valid `tm`, whose pointer is not followed before the library has set it; the pointers
    // are to live values of the right type, the format ends with NUL, and no more than the length of `text` is written.
    let length = unsafe {
        let mut parts: libc::tm = std::mem::zeroed();
        match zone {
            Zone::Local => libc::localtime_r(&raw const seconds, &raw mut parts),
            Zone::Gmt => libc::gmtime_r(&raw const seconds, &raw mut parts),
        };
        libc::strftime(text.as_mut_ptr().cast(), text.len(), format.as_ptr(), &raw const parts)
    };
    text.truncate(length);
    (length > 0).then_some(text)
}

impl LocalTime {
    /// Offset of the time zone in minutes east of Greenwich.
    pub fn offset_minutes(self) -> i32 {
        self.offset_minutes
    }

    /// `2026/11/20 19:00:00`
    pub fn error_log(self) -> impl fmt::Display {
        Form(self, Style::ErrorLog)
    }

    /// `20/Nov/2026:19:00:00 +0000`: `$time_local`.
    pub fn common_log(self) -> impl fmt::Display {
        Form(self, Style::CommonLog)
    }

    /// `Nov 20 19:00:00` (RFC 3164 §4.1.2)
    pub fn syslog(self) -> impl fmt::Display {
        Form(self, Style::Syslog)
    }

    /// Seconds since midnight.
    pub fn seconds_of_day(self) -> u64 {
        (u64::from(self.hour) * 60 + u64::from(self.minute)) * 60 + u64::from(self.second)
    }

    /// `2026-11-20T19:00:00+00:00`: `$time_iso8601`.
    pub fn iso8601(self) -> impl fmt::Display {
        Form(self, Style::Iso8601)
    }

    /// `2026-11-20T19:00:00.123+00:00`, with these milliseconds. (RFC 3339 section 5.6)
    pub fn iso8601_with(self, milliseconds: u32) -> impl fmt::Display {
        Form(self, Style::Iso8601With(milliseconds))
    }
}

struct Form(LocalTime, Style);

enum Style {
    ErrorLog,
    CommonLog,
    Syslog,
    Iso8601,
    Iso8601With(u32),
}

impl fmt::Display for Form {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LocalTime { year, month, day, hour, minute, second, offset_minutes } = self.0;
        let sign = if offset_minutes < 0 { '-' } else { '+' };
        let (offset_hours, offset_rest) = (offset_minutes.abs() / 60, offset_minutes.abs() % 60);
        let number = month + 1;
        match self.1 {
            Style::ErrorLog => {
                write!(formatter, "{year:04}/{number:02}/{day:02} {hour:02}:{minute:02}:{second:02}")
            }
            Style::CommonLog => {
                let name = MONTHS[usize::from(month) % MONTHS.len()];
                write!(
                    formatter,
                    "{day:02}/{name}/{year:04}:{hour:02}:{minute:02}:{second:02} \
                     {sign}{offset_hours:02}{offset_rest:02}"
                )
            }
            Style::Syslog => {
                let name = MONTHS[usize::from(month) % MONTHS.len()];
                write!(formatter, "{name} {day:2} {hour:02}:{minute:02}:{second:02}")
            }
            Style::Iso8601 => write!(
                formatter,
                "{year:04}-{number:02}-{day:02}T{hour:02}:{minute:02}:{second:02}{sign}{offset_hours:02}:\
                 {offset_rest:02}"
            ),
            Style::Iso8601With(milliseconds) => write!(
                formatter,
                "{year:04}-{number:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milliseconds:03}\
                 {sign}{offset_hours:02}:{offset_rest:02}"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_forms() {
        let time = LocalTime { year: 2026, month: 10, day: 2, hour: 3, minute: 4, second: 5, offset_minutes: -210 };
        assert_eq!(time.error_log().to_string(), "2026/11/02 03:04:05");
        assert_eq!(time.common_log().to_string(), "02/Nov/2026:03:04:05 -0330");
        assert_eq!(time.syslog().to_string(), "Nov  2 03:04:05");
        assert_eq!(time.iso8601().to_string(), "2026-11-02T03:04:05-03:30");
        assert_eq!(time.iso8601_with(7).to_string(), "2026-11-02T03:04:05.007-03:30");
    }

    #[test]
    fn times_are_shown_in_any_format() {
        let shown = |format: &str| {
            format_time(format.as_bytes(), 784_111_777, Zone::Gmt).map(|text| String::from_utf8(text).unwrap())
        };
        assert_eq!(shown("%A, %d-%b-%Y %H:%M:%S %Z").as_deref(), Some("Sunday, 06-Nov-1994 08:49:37 GMT"));
        assert_eq!(shown(""), None);
        assert_eq!(shown(&"x".repeat(2048)), None);
        assert!(format_time(b"%Z %z", 784_111_777, Zone::Local).is_some());
    }

    #[test]
    fn a_second_is_worked_out_once_and_right_the_next_time() {
        let first = local_time(1_000_000_000);
        assert_eq!(local_time(1_000_000_000), first);
        assert_ne!(local_time(1_000_000_001), first);
    }
}
