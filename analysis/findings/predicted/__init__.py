"""What records say of forecasts that were made before their ranks started (predict=auto)."""
