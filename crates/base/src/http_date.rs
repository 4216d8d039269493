//! HTTP dates: writes IMF-fixdate and reads the three forms that a recipient must accept (RFC 9110 §5.6.7).
//!
//! Reads no clock: a two-digit year below 70 means 20xx, as in nginx. The name of the weekday is not compared with the
//! date (nginx does not either). Names are matched case-insensitively, as RFC 9111 §4.2 recommends for caches. Dates
//! before 1970 are refused. Invariant: `parse(&format(t)) == Some(t)` for every `t` up to [`SECONDS_MAX`].

/// The last second that an HTTP date can express: the end of the year 9999.
pub const SECONDS_MAX: u64 = 253_402_300_799;

/// The length of an IMF-fixdate in bytes.
pub const LENGTH: usize = 29;

/// Writes `seconds` since 1970 as an IMF-fixdate: `Sun, 06 Nov 1994 08:49:37 GMT`.
///
/// Times after [`SECONDS_MAX`] are written as [`SECONDS_MAX`].
pub fn format(seconds: u64) -> [u8; LENGTH] {
    let seconds = seconds.min(SECONDS_MAX);
    let (days, second_of_day) = (seconds / 86_400, seconds % 86_400);
    let date = date_of(days);

    let mut out = *b"Thu, 00 Jan 0000 00:00:00 GMT";
    // 1970-01-01 was a Thursday, the first entry of the table.
    out[..3].copy_from_slice(WEEKDAYS_FROM_THURSDAY[(days % 7) as usize]);
    write_digits(&mut out[5..7], date.day);
    out[8..11].copy_from_slice(MONTHS[date.month as usize - 1]);
    write_digits(&mut out[12..16], date.year);
    write_digits(&mut out[17..19], second_of_day / 3_600);
    write_digits(&mut out[20..22], second_of_day / 60 % 60);
    write_digits(&mut out[23..25], second_of_day % 60);
    out
}

/// Parses an HTTP date: IMF-fixdate (`Sun, 06 Nov 1994 08:49:37 GMT`), RFC 850 (`Sunday, 06-Nov-94 08:49:37 GMT`) or
/// asctime (`Sun Nov  6 08:49:37 1994`). Returns seconds since 1970, or `None` if the text has none of these forms.
pub fn parse(text: &[u8]) -> Option<u64> {
    let weekday = text.iter().take_while(|byte| byte.is_ascii_alphabetic()).count();
    if !(3..=9).contains(&weekday) {
        return None;
    }
    let mut cursor = Cursor { rest: &text[weekday..] };
    let (date, second_of_day) = match cursor.byte()? {
        b',' => cursor.date_after_comma()?,
        b' ' => cursor.asctime()?,
        _ => return None,
    };
    cursor.rest.is_empty().then_some(())?;
    Some(days_until(&date)? * 86_400 + second_of_day)
}

const WEEKDAYS_FROM_THURSDAY: [&[u8; 3]; 7] = [b"Thu", b"Fri", b"Sat", b"Sun", b"Mon", b"Tue", b"Wed"];
/// Abbreviated names of the months, January first.
pub const MONTHS: [&[u8; 3]; 12] =
    [b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec"];

/// A day of the proleptic Gregorian calendar.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Date {
    /// Year.
    pub year: u64,
    /// Month, from 1 to 12.
    pub month: u64,
    /// Day of the month, from 1 to 31.
    pub day: u64,
}

struct Cursor<'t> {
    rest: &'t [u8],
}

impl Cursor<'_> {
    fn date_after_comma(&mut self) -> Option<(Date, u64)> {
        self.expect(b' ')?;
        let day = self.digits(2)?;
        let date = match self.byte()? {
            b' ' => {
                let month = self.month()?;
                self.expect(b' ')?;
                Date { year: self.digits(4)?, month, day }
            }
            b'-' => {
                let month = self.month()?;
                self.expect(b'-')?;
                let year = self.digits(2)?;
                Date { year: if year < 70 { 2000 + year } else { 1900 + year }, month, day }
            }
            _ => return None,
        };
        self.expect(b' ')?;
        let second_of_day = self.second_of_day()?;
        let (zone, rest) = self.rest.split_first_chunk::<4>()?;
        zone.eq_ignore_ascii_case(b" GMT").then_some(())?;
        self.rest = rest;
        Some((date, second_of_day))
    }

    fn asctime(&mut self) -> Option<(Date, u64)> {
        let month = self.month()?;
        self.expect(b' ')?;
        let day = if self.rest.first() == Some(&b' ') {
            self.byte()?;
            self.digits(1)?
        } else {
            self.digits(2)?
        };
        self.expect(b' ')?;
        let second_of_day = self.second_of_day()?;
        self.expect(b' ')?;
        Some((Date { year: self.digits(4)?, month, day }, second_of_day))
    }

    fn second_of_day(&mut self) -> Option<u64> {
        let hour = self.digits(2)?;
        self.expect(b':')?;
        let minute = self.digits(2)?;
        self.expect(b':')?;
        let second = self.digits(2)?;
        (hour < 24 && minute < 60 && second < 60).then_some(hour * 3_600 + minute * 60 + second)
    }

    fn month(&mut self) -> Option<u64> {
        let (name, rest) = self.rest.split_first_chunk::<3>()?;
        self.rest = rest;
        MONTHS.iter().position(|month| month.eq_ignore_ascii_case(name)).map(|index| index as u64 + 1)
    }

    fn digits(&mut self, count: usize) -> Option<u64> {
        let (digits, rest) = self.rest.split_at_checked(count)?;
        self.rest = rest;
        crate::units::parse_number(digits)
    }

    fn expect(&mut self, wanted: u8) -> Option<()> {
        (self.byte()? == wanted).then_some(())
    }

    fn byte(&mut self) -> Option<u8> {
        let (&byte, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(byte)
    }
}

/// Returns the days from 1970-01-01 to the date, or `None` if the date is earlier or does not exist.
fn days_until(date: &Date) -> Option<u64> {
    let is_leap = date.year.is_multiple_of(4) && (!date.year.is_multiple_of(100) || date.year.is_multiple_of(400));
    let days_in_month = match date.month {
        4 | 6 | 9 | 11 => 30,
        2 => 28 + u64::from(is_leap),
        _ => 31,
    };
    if date.year < 1970 || !(1..=days_in_month).contains(&date.day) {
        return None;
    }
    // Years begin in March here, so that the leap day is the last day of a year.
    let year = date.year - u64::from(date.month <= 2);
    let day_of_year = (153 * ((date.month + 9) % 12) + 2) / 5 + date.day - 1;
    Some(year * 365 + year / 4 - year / 100 + year / 400 + day_of_year - DAYS_BEFORE_1970)
}

/// Returns the date that is `days` days after 1970-01-01.
pub fn date_of(days: u64) -> Date {
    const DAYS_IN_400_YEARS: u64 = 146_097;
    let days = days + DAYS_BEFORE_1970;
    let (era, day) = (days / DAYS_IN_400_YEARS, days % DAYS_IN_400_YEARS);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let month = (month_from_march + 2) % 12 + 1;
    Date {
        year: era * 400 + year + u64::from(month <= 2),
        month,
        day: day_of_year - (153 * month_from_march + 2) / 5 + 1,
    }
}

/// Days from 0000-03-01 to 1970-01-01.
const DAYS_BEFORE_1970: u64 = 719_468;

fn write_digits(out: &mut [u8], mut value: u64) {
    for digit in out.iter_mut().rev() {
        *digit = b'0' + (value % 10) as u8;
        value /= 10;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::{Duration, UNIX_EPOCH};

    const NOVEMBER_1994: u64 = 784_111_777;

    #[test]
    fn writes_imf_fixdate() {
        assert_eq!(&format(NOVEMBER_1994), b"Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!(&format(0), b"Thu, 01 Jan 1970 00:00:00 GMT");
        assert_eq!(&format(951_782_400), b"Tue, 29 Feb 2000 00:00:00 GMT");
        assert_eq!(&format(u64::MAX), b"Fri, 31 Dec 9999 23:59:59 GMT");
    }

    #[test]
    fn reads_the_three_forms() {
        for text in ["Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"] {
            assert_eq!(parse(text.as_bytes()), Some(NOVEMBER_1994), "{text}");
        }
        assert_eq!(parse(b"SUN, 06 nov 1994 08:49:37 gmt"), Some(NOVEMBER_1994));
        assert_eq!(parse(b"Mon Nov 28 08:49:37 1994"), Some(NOVEMBER_1994 + 22 * 86_400));
        assert_eq!(parse(b"Friday, 01-Jan-38 00:00:00 GMT"), Some(2_145_916_800));
    }

    #[test]
    fn refuses_dates_that_do_not_exist() {
        for text in [
            "Sun, 00 Nov 1994 08:49:37 GMT",
            "Sun, 31 Nov 1994 08:49:37 GMT",
            "Thu, 29 Feb 1900 08:49:37 GMT",
            "Thu, 29 Feb 2023 08:49:37 GMT",
            "Sun, 06 Nov 1994 24:00:00 GMT",
            "Sun, 06 Nov 1994 08:60:00 GMT",
            "Sun, 06 Nov 1994 08:49:60 GMT",
            "Wed, 31 Dec 1969 23:59:59 GMT",
        ] {
            assert_eq!(parse(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn refuses_other_forms() {
        for text in [
            "",
            "0",
            "784111777",
            "Sun",
            "Sun,",
            ", 06 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 08:49:37",
            "Sun, 06 Nov 1994 08:49:37 CET",
            "Sun, 06 Nov 1994 08:49:37 GMT ",
            "Sun, 6 Nov 1994 08:49:37 GMT",
            "Sun Nov 6 08:49:37 1994",
        ] {
            assert_eq!(parse(text.as_bytes()), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn written_dates_are_read_back(seconds in 0..=SECONDS_MAX) {
            prop_assert_eq!(parse(&format(seconds)), Some(seconds));
        }

        #[test]
        fn agrees_with_an_independent_implementation(seconds in 0..=SECONDS_MAX) {
            let expected = httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(seconds));
            prop_assert_eq!(&format(seconds)[..], expected.as_bytes());
        }

        #[test]
        fn hostile_text_never_panics(text in proptest::collection::vec(any::<u8>(), 0..40)) {
            let _ = parse(&text);
        }

        #[test]
        fn damaged_dates_never_panic(seconds in 0..=SECONDS_MAX, at in 0..LENGTH, byte in any::<u8>()) {
            let mut text = format(seconds);
            text[at] = byte;
            let _ = parse(&text);
        }
    }
}
