//! Bytes, units, dates, trees and histograms that every crate shares. No I/O.
